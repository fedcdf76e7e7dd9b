"""evenstep with its normal features on.

On: metrics (loss, gradient norm, learning rate, at every update), events with two hooks that listen to them, the
guard against gradients that are not finite, keyed randomness, a stream whose state is kept at every update, the JSONL
writer into a run folder. Values are read and written once in 50 updates, as by all others, but those of every update.
The run's one checkpoint, at its end, is after the timed part.
"""

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from evenstep import Checkpointing, Logging, StreamData, Task, Trainer, Training
from evenstep.events import JsonlWriter, Statistics, Timer
from evenstep.options import Compile
from evenstep.parallel import Strategy
from harness.feed import Feed
from harness.work import CLIP_NORM, LOSS_EVERY_UPDATES, Work, summed_loss


class Classify(Task):
    """The class of each unit, a sample or a token."""

    def weight(self, batch: Any) -> int:
        return batch[1].numel()

    def loss(self, output: Any, batch: Any) -> Tensor:
        return summed_loss(output, batch[1])


class Stream:
    """The feed, and how much of it was given, so that the run could be resumed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._feed, self._given, None):
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["given"]


def train_compiled(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    """Train with the model compiled."""
    return train(model, feed, work, compile="model")


def train_compiled_update(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    """Train with each update compiled as one graph."""
    return train(model, feed, work, compile="update")


def train(
    model: nn.Module,
    feed: Feed,
    work: Work,
    strategy: Strategy | None = None,
    *,
    compile: Compile = "off",
    checkpoint: Checkpointing | None = None,
) -> list[float]:
    """Train, on several ranks with a `strategy`: each rank's feed then holds its own micro-batches."""
    ranks = 1 if strategy is None else strategy.group.ranks
    with tempfile.TemporaryDirectory() as own:
        folder = own if strategy is None else strategy.group.gather(own)[0]
        trainer = Trainer(
            model=model,
            task=Classify(),
            optimizer=work.optimizer(model),
            data=StreamData(
                Stream(feed),
                batched=True,
                num_microbatches=work.num_microbatches * ranks,
            ),
            updates=feed.num_batches // work.num_microbatches,
            device="cpu",
            strategy=strategy,
            train=Training(clip_norm=CLIP_NORM, compile=compile),
            hooks=[Timer(every_updates=LOSS_EVERY_UPDATES), Statistics()],
            log=Logging(writers=[JsonlWriter()], every_updates=LOSS_EVERY_UPDATES),
            folder=Path(folder),
            checkpoint=checkpoint or Checkpointing(),
        )
        trainer.train()
        return [record.value for record in trainer.storage.history("train/loss")]
