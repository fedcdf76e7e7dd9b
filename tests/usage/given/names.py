"""What short examples leave out: imports, a model, a dataset, and the rest of a call that says `...`."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader

import evenstep
from evenstep import *

torch.manual_seed(0)
model, task = Net(), Classify()
dataset = [(torch.randn(16) + 2 * torch.eye(16)[number % 4], torch.tensor(number % 4)) for number in range(512)]
held_out = dataset[:16]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def Trainer(*rest, **options):
    """`Trainer(..., some=of_it)`, with what it leaves out."""
    assert rest in ((), (...,))
    left_out = {
        "model": model if isinstance(model, Net) else Net(),
        "task": Classify(),
        "data": evenstep.MapData(dataset, global_batch_size=16, micro_batch_size=8),
        "updates": 200,
        "device": "cpu",
        "log": evenstep.Logging(writers=()),
    }
    options = {**left_out, **options} if rest else options
    options.setdefault("optimizer", torch.optim.AdamW(options["model"].parameters(), lr=3e-3))
    return evenstep.Trainer(**options)


trainer = Trainer(...)


def trainer_data():
    return evenstep.MapData(held_out, global_batch_size=8, shuffle=False)
