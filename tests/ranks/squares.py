"""The run that tests of launchers start: a small model with dropout, whose bits tell when anything went another way."""

from pathlib import Path

RECIPE = """
import os, time
import torch
from torch import nn
import evenstep

class Square(evenstep.Task):
    def __init__(self, slow_s=0.0, fail=False):
        self.slow_s, self.fail = slow_s, fail
    def loss(self, output, batch):
        time.sleep(float(os.environ.get("SLOW_S", self.slow_s)))  # a run that goes on keeps its arguments
        if self.fail and os.environ.get("RANK") == "1":
            raise ValueError("rank 1 does not like this batch")
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

def model(middle=0):
    blocks = [layer for _ in range(middle) for layer in (nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh())]
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), *blocks, nn.Linear(8, 1))

def points(count=40):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, generator=generator), torch.tensor(n % 3 / 2)) for n in range(count)]
"""
RUN = """
name = "run"
device = "cpu"
threads = 1
model.target = "recipe.py:model"
task.target = "recipe.py:Square"
data.global_batch_size = 8
data.micro_batch_size = 2
data.train.target = "recipe.py:points"
optimizer.name = "AdamW"
optimizer.lr = 0.01
parallel.reduction = "ordered"
"""


def write_run(folder: Path, *, updates: int, more: str = "", recipe: str = "") -> Path:
    """Write the recipe and the run file into `folder`; gives the run file.

    Args:
        folder: that exists.
        updates: of the run.
        more: lines of TOML, behind the others.
        recipe: lines of Python, behind the others.
    """
    (folder / "recipe.py").write_text(RECIPE + recipe)
    file = folder / "run.toml"
    file.write_text(f"{RUN}train.updates = {updates}\n{more}")
    return file
