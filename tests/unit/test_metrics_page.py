"""docs/metrics.md: its code runs, and it names every metric, phase and writer that there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep import Hook, Logging, MapData, Statistics, Task, Text, Trainer
from evenstep.events import WRITERS, Shown
from evenstep.train.timing import PHASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
NAMES = [name for row in re.findall(r"^\| (`[^|]*?) \|", PAGE, re.M) for name in re.findall(r"`([^`]+)`", row)]


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"evenstep": evenstep, "PAD": 0}
    exec(block, names)
    return names


def is_named(metric: str) -> bool:
    words = {
        "NAME": "[a-z_]+",
        "METRIC": "[a-z_]+",
        "TASK": "[a-z]+",
        "GROUP": "[a-z]+",
        "LAYER": r"[\w.]+",
        "i": r"\d+",
    }
    patterns = (re.sub(r"NAME|METRIC|TASK|GROUP|LAYER|(?<=/)i$", lambda found: words[found[0]], name) for name in NAMES)
    return any(re.fullmatch(pattern, metric) for pattern in patterns)


class Squares(Task):
    unit = "tokens"

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def train(folder: Path, *hooks: Hook, writers: Any = ("jsonl",), task: Task | None = None) -> Trainer:
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    model = nn.Sequential(nn.Linear(1, 1))
    trainer = Trainer(
        model=model,
        task=task or Squares(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        data=MapData(pairs, global_batch_size=4),
        evaluations=MapData(pairs, global_batch_size=8, shuffle=False),
        updates=4,
        device="cpu",
        folder=folder,
        hooks=list(hooks),
        log=Logging(writers=writers, every_updates=2),
    )
    trainer.train()
    return trainer


def test_every_metric_of_a_run_is_in_the_table(tmp_path: Path) -> None:
    trainer = train(tmp_path, Statistics(every_updates=2, update_ratio=True, gradient_norms=True))
    phases = {f"perf/{phase}_s" for phase in PHASES}
    unnamed = [name for name in trainer.storage.names() if not is_named(name) and name not in phases]
    assert [name for name in unnamed if not name.startswith("perf/memory_")] == []
    assert {"progress/tokens", "perf/forward_s"} <= set(trainer.storage.names())


@pytest.mark.parametrize("name", [*PHASES, *WRITERS])
def test_every_phase_and_every_writer_is_named(name: str) -> None:
    assert name in NAMES


def test_the_writer_of_ones_own_writes(tmp_path: Path) -> None:
    page = next(run(block)["Page"] for block in BLOCKS if "class Page" in block)()
    train(tmp_path, writers=[page])
    page.event("shown", Shown(update=4, name="valid/first", value=Text("once")))
    page.flush()
    lines = (tmp_path / "newest.txt").read_text().splitlines()
    assert any(line.startswith("valid/loss ") and line.endswith(" at 4") for line in lines)
    assert lines[-1] == "valid/first at 4: once"


def test_what_is_shown_is_shown(tmp_path: Path) -> None:
    names = next(run(block) for block in BLOCKS if "class Weights" in block)
    train(tmp_path, names["Weights"](), task=names["Translate"]())
    lines = [json.loads(line) for line in (tmp_path / "shown.jsonl").read_text().splitlines()]
    assert {line["name"] for line in lines} == {"valid/first", "valid/attention"}  # there are no hundred updates
