"""`evenstep check RUN.toml`: finds every fault, builds everything, and makes one update of one batch.

Nothing is written: no folder, no checkpoint, no metric, no byte code. It says nothing about how well the run trains.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import final

import torch

from evenstep.build import Parts, build_hooks, build_parts, build_writers
from evenstep.cli.exits import EXIT_DONE
from evenstep.cli.summary import describe
from evenstep.config.load import open_run
from evenstep.config.sources import from_arguments, from_environment
from evenstep.data import Position
from evenstep.errors import DataError
from evenstep.events import Bus, Hook, UpdateBegin, UpdateEnd
from evenstep.parallel import Single


@final
class OneUpdate(Hook):
    """Stop after one update, and remember how it was cut."""

    def __init__(self) -> None:
        self.num_microbatches = 0
        self.num_samples = 0

    def before_update(self, event: UpdateBegin) -> None:
        self.num_microbatches = event.num_microbatches

    def after_update(self, event: UpdateEnd) -> None:
        self.num_samples = event.num_samples
        self.trainer.ask_stop("checked")


def run(path: str, settings: list[str]) -> int:
    """Check it."""
    with open_run(Path(path), [*from_environment(os.environ), *from_arguments(settings)]) as opened:
        if opened.config.threads is not None:
            torch.set_num_threads(opened.config.threads)
        parts = build_parts(opened)
        with closing(parts):
            one = OneUpdate()
            trainer = parts.trainer(hooks=[one], strategy=Single())
            print("\n".join(describe(parts, trainer)), flush=True)
            build_writers(opened.config)
            Bus(build_hooks(opened.config, parts.hooks), trainer)
            _take_first_batches(parts)
            result = trainer.train()
        parts_of_it = f"{one.num_microbatches} micro-batch{'es' if one.num_microbatches > 1 else ''}"
        losses = [
            f"{name} {value:.4g}"
            for name, value in sorted(result.metrics.items())
            if name == "train/loss" or (name.startswith("train/") and name.endswith("/loss"))
        ]
        print(
            f"checked     1 update of {one.num_samples} samples in {parts_of_it}: {', '.join(losses)}; nothing was "
            f"written"
        )
    return EXIT_DONE


def _take_first_batches(parts: Parts) -> None:
    for name, data in parts.evaluations.items():
        with closing(data):
            batches = data.batches(Position(), seed=parts.config.seed)
            if next(batches, None) is None:
                raise DataError(f"the evaluation {name} gave no batch at all; look at its length and filters.")
