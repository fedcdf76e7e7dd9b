"""A recipe that trains in milliseconds, with what may be wrong in one, for tests that use the command line."""

from pathlib import Path

RUN = """
name = "tiny"
device = "cpu"
[model]
target = "parts.py:Still"
[task]
target = "parts.py:Measured"
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
[evaluation]
every_updates = 2
[checkpoint]
every_updates = 2
"""

PARTS = """
import time
import torch
from torch import nn
from evenstep import Loss, Task

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

class Still(Net):
    def __init__(self, dropout: float = 0.0):
        super().__init__(dropout=dropout)

class Measured(Task):
    def loss(self, output, batch):
        error = (output - batch[1]) ** 2
        return Loss(error.sum(), metrics={"close": ((error < 0.5).sum(), len(error))})

class OfTheBatch(Task):
    def loss(self, output, batch):
        return (output - output.mean()).square().sum()

class Constant(Measured):
    def weight(self, batch):
        return 1.0

class OnlyTrains(Measured):
    def loss(self, output, batch):
        if not torch.is_grad_enabled():
            raise KeyError("labels")
        return super().loss(output, batch)

def layers():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))

def dtypes():
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1).double())
"""

WRONG = """
import torch
from torch import nn
from evenstep import Hook, Task
from parts import Net, pairs

def frozen():
    return Net().requires_grad_(False)

made = Net()

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

class NoTask:
    pass

class Unsaveable(Hook):
    def state_dict(self):
        return {"kept": object()}

class Early(Task):
    late_weight = True

    def loss(self, output, batch):
        return output.sum()
"""


def write(folder: Path, *, run: str = RUN) -> None:
    """Write it into `folder`, with another run file if need be."""
    (folder / "run.toml").write_text(run)
    (folder / "parts.py").write_text(PARTS)
    (folder / "wrong.py").write_text(WRONG)
