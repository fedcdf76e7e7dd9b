"""The multipliers that PyTorch's own schedulers give, as an independent reference."""

from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler


@pytest.fixture
def torch_factors() -> Callable[[Callable[[torch.optim.Optimizer], LRScheduler], int], list[float]]:
    def run(make: Callable[[torch.optim.Optimizer], LRScheduler], updates: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = make(optimizer)
        factors: list[float] = []
        for _ in range(updates):
            factors.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return factors

    return run
