"""A tiny recipe that trains in milliseconds, with all the ways it may go wrong, and the command line over it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from evenstep.cli import main

RUN = """
name = "tiny"
device = "cpu"
[model]
target = "parts.py:Net"
[task]
target = "parts.py:Regress"
[data]
global_batch_size = 8
micro_batch_size = 3
[data.train]
target = "parts.py:pairs"
[data.evaluations.valid]
target = "parts.py:pairs"
args.count = 16
[train]
updates = 6
[optimizer]
name = "AdamW"
lr = 0.01
[lr_schedule]
kind = "cosine"
warmup_updates = 2
[evaluate]
every_updates = 3
[checkpoint]
every_updates = 2
[log]
every_updates = 2
"""

PARTS = """
import time
import torch
from torch import nn
from evenstep import Hook, Task

class Net(nn.Module):
    def __init__(self, width: int = 4, dropout: float = 0.5):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)

class Slow(Net):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

class Regress(Task):
    def loss(self, output, batch):
        return ((output - batch[1]) ** 2).sum()

def pairs(count: int = 40):
    generator = torch.Generator().manual_seed(0)
    return [(row, row.sum(dim=0, keepdim=True)) for row in torch.randn(count, 2, generator=generator)]
"""

WRONG = """
import torch
from torch import nn
from evenstep import Hook, Task
from parts import Net, pairs

def frozen():
    return Net().requires_grad_(False)

def no_model():
    return 3

def raising():
    return deeper()

def deeper():
    raise ValueError("no such file: weights.pt")

def empty():
    return []

def wide():
    return [(torch.zeros(3), torch.zeros(1))] * 40

class Broken:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 13:
            raise OSError("13.png is broken")
        return torch.zeros(2), torch.zeros(1)

class Stream:
    def __iter__(self):
        return iter(pairs())

class Counted(Stream):
    def __init__(self):
        self.place = 0

    def __iter__(self):
        for self.place in range(self.place + 1, 41):
            yield pairs()[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

class NotFinite(Task):
    def loss(self, output, batch):
        return output.sum() * float("nan")

class NoLoss(Task):
    def loss(self, output, batch):
        return None

class Misspelt(Hook):
    def after_updaet(self, event): ...

class Fails(Hook):
    def __init__(self, at: int):
        self.at = at

    def after_update(self, event):
        if event.update == self.at:
            raise RuntimeError("the hook has had enough")
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's folder, which is the working directory as well."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def evenstep(recipe: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""

    def run(*arguments: str) -> Done:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
