"""A recipe that trains in milliseconds, with what may be wrong in one, for tests that use the command line."""

from pathlib import Path

RUN = """
name = "tiny"
device = "cpu"
[model]
target = "parts.py:Net"
[task]
target = "parts.py:Regress"
[data]
global_batch_size = 8
micro_batch_size = 4
[data.train]
target = "parts.py:pairs"
[data.evaluations.valid]
target = "parts.py:pairs"
args.count = 16
[train]
updates = 4
[optimizer]
name = "SGD"
lr = 0.01
[evaluate]
every_updates = 2
[checkpoint]
every_updates = 2
"""

PARTS = """
import torch
from torch import nn
from evenstep import Hook, Loss, Task

class Net(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4, 1))

    def forward(self, x):
        return self.layers(x)

class Regress(Task):
    def loss(self, output, batch):
        error = (output - batch[1]) ** 2
        return Loss(error.sum(), metrics={"close": ((error < 0.5).sum(), len(error))})

class OfTheBatch(Task):
    def loss(self, output, batch):
        return (output - output.mean()).square().sum()

class Constant(Regress):
    def weight(self, batch):
        return 1.0

class OnlyTrains(Regress):
    def loss(self, output, batch):
        if not torch.is_grad_enabled():
            raise KeyError("labels")
        return super().loss(output, batch)

def pairs(count: int = 40):
    generator = torch.Generator().manual_seed(0)
    return [(row, row.sum(dim=0, keepdim=True)) for row in torch.randn(count, 2, generator=generator)]

def frozen():
    return Net().requires_grad_(False)

def no_model():
    return 3

def raising():
    raise ValueError("no such file: weights.pt")

def empty():
    return []

def layers():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))

def dtypes():
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1).double())

class Stream:
    def __iter__(self):
        return iter(pairs())

class Counted(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...

class Misspelt(Hook):
    def after_updaet(self, event): ...

class NoTask:
    pass

class Unsaveable(Hook):
    def state_dict(self):
        return {"kept": object()}

class Early(Task):
    late_weight = True
    reduction = "mean"

    def loss(self, output, batch):
        return output.sum()
"""


def write(folder: Path) -> None:
    """Write it into `folder`."""
    (folder / "run.toml").write_text(RUN)
    (folder / "parts.py").write_text(PARTS)
