"""docs/metrics.md names every metric, phase and writer that there is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Logging, MapData, Statistics, Task, Trainer
from evenstep.events import WRITERS
from evenstep.train.timing import PHASES

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NAMES = [name for row in re.findall(r"^\| (`[^|]*?) \|", PAGE, re.M) for name in re.findall(r"`([^`]+)`", row)]


class Squares(Task):
    unit = "tokens"

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def is_named(metric: str) -> bool:
    patterns = (re.sub(r"NAME|METRIC|TASK|GROUP|LAYER|(?<=/)i$", r"[\\w.]+", name) for name in NAMES)
    return any(re.fullmatch(pattern, metric) for pattern in patterns)


def test_every_metric_of_a_run_is_in_the_table(tmp_path: Path) -> None:
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    model = nn.Sequential(nn.Linear(1, 1))
    trainer = Trainer(
        model=model,
        task=Squares(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        data=MapData(pairs, global_batch_size=4),
        evaluations=MapData(pairs, global_batch_size=8, shuffle=False),
        updates=4,
        device="cpu",
        folder=tmp_path,
        hooks=[Statistics(every_updates=2, update_ratio=True, gradient_norms=True)],
        log=Logging(writers=("jsonl",), every_updates=2),
    )
    trainer.train()
    unnamed = {name for name in trainer.storage.names() if not is_named(name)} - {f"perf/{phase}_s" for phase in PHASES}
    assert not [name for name in unnamed if not name.startswith("perf/memory_")]
    assert {"progress/tokens", "perf/forward_s"} <= set(trainer.storage.names())


@pytest.mark.parametrize("name", [*PHASES, *WRITERS])
def test_every_phase_and_every_writer_is_named(name: str) -> None:
    assert name in NAMES
