"""What ranks run for the battery of models under `fsdp`: all models in turn, in one group."""

from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from sharded_models_nets import NETS, Experts
from torch import Tensor, nn

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


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of all that is trained; what shards can't be cut from (single numbers, or none) in a group of its own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    cut, whole = [p for p in trained if p.ndim and p.numel()], [p for p in trained if not (p.ndim and p.numel())]
    groups: list[Any] = [{"params": some} for some in (cut, whole) if some]
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


def trainer_of(net: str, strategy: Any, *, updates: int = 3, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = (Experts if net == "Experts" else NETS[net])().double()
    options: dict[str, Any] = {
        # 30 samples, of which each update takes 10 in 5 micro-batches: ranks have unequal numbers of them
        "data": MapData(data(30), global_batch_size=10, micro_batch_size=2, shuffle=False),
        "optimizer": optimizer_of(model),
        "task": Square(),
    }
    return Trainer(model=model, updates=updates, device="cpu", strategy=strategy, **(options | more))


def train_all(nets: tuple[str, ...], strategies: tuple[str, ...]) -> dict[tuple[str, str], tuple[str, Any]]:
    """By strategy and model: the digest of the parameters after training, and their values."""
    group = group_of_ranks()
    found = {}
    for strategy in strategies:
        for net in nets:
            one = trainer_of(net, strategy_named(strategy, group))
            one.train()
            model = one.state_dict()["model"]
            found[strategy, net] = digest(model), _values(model)
    if group is not None:
        group.close()
    return found


def _values(model: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in model.items()}


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        return self.odd(x) if odd else self.even(x)


class Gated(nn.Module):
    """Each batch uses half of the parameters of the only item."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gate()])

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.blocks[0](x, int(number[0]) // 2 % 2 == 1).sum(-1)


def train_gathered_in_16_bits() -> dict[str, list[float]]:
    """Parameters after training in shards that are gathered in bfloat16; of one process, in float32."""
    from evenstep.parallel import Fsdp, Single

    group = group_of_ranks()
    torch.manual_seed(0)
    model = Gated()
    one = Trainer(
        model=model,
        task=Square(),
        updates=2,
        device="cpu",
        strategy=Single() if group is None else Fsdp(group),
        precision="32-true" if group is None else "bf16-true",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=MapData(
            [(x.float(), y.float(), n) for x, y, n in data(16)],
            global_batch_size=8,
            micro_batch_size=2,
            shuffle=False,
        ),
    )
    one.train()
    values = _values(one.state_dict()["model"])
    if group is not None:
        group.close()
    return values
