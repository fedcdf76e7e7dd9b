"""What ranks run for the battery of models under `fsdp`: all models in turn, in one group."""

from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from sharded_models_nets import NETS
from torch import Tensor

from evenstep import MapData, Task, Trainer


class Square(Task):
    """Σ (output - y)²."""

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        return {"x": batch[0], "number": batch[2]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def data(samples: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, generator=generator, dtype=torch.float64),
            torch.randn((), generator=generator, dtype=torch.float64),
            torch.tensor(number),
        )
        for number in range(samples)
    ]


def trainer_of(net: str, strategy: Any, *, updates: int = 3, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = NETS[net]().double()
    options: dict[str, Any] = {
        # 30 samples, of which each update takes 10 in 5 micro-batches: ranks have unequal numbers of them
        "data": MapData(data(30), global_batch_size=10, micro_batch_size=2, shuffle=False),
        "optimizer": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=True),
        "task": Square(),
    }
    return Trainer(model=model, updates=updates, device="cpu", strategy=strategy, **(options | more))


def train_all(nets: list[str], strategy: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each model the digest of its state after training, and its parameters."""
    group = group_of_ranks()
    found = {}
    for net in nets:
        one = trainer_of(net, strategy_named(strategy, group))
        one.train()
        model = one.state_dict()["model"]
        found[net] = digest(model), {name: tensor.tolist() for name, tensor in model.items()}
    if group is not None:
        group.close()
    return found
