"""What tests of schedules run on several ranks."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import MapData, Task, Trainer, find_lr

POINTS = [(torch.randn(4, generator=torch.Generator().manual_seed(n)), torch.tensor([n % 3 / 2])) for n in range(24)]


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def found(*strategies: str) -> dict[str, tuple[tuple[float, ...], bool]]:
    """The losses of a search with each strategy, and whether the state is what it was."""
    results: dict[str, tuple[tuple[float, ...], bool]] = {}
    for strategy in strategies:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        trainer = Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
            data=MapData([(x.double(), y.double()) for x, y in POINTS], global_batch_size=8, micro_batch_size=2),
            updates=6,
            device="cpu",
            strategy=strategy,
        )
        trainer.updates = 2
        trainer.train()
        before = copy.deepcopy(trainer.state_dict())
        search = find_lr(trainer, lowest=1e-4, highest=1.0, updates=8)
        results[strategy] = search.losses, same(before, trainer.state_dict())
    return results


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right
