"""The trainer on several ranks, as threads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Ema, MapData, Task, Trainer, Training
from evenstep.parallel import Ordered


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def test_the_average_begins_at_the_first_ranks_parameters_on_all_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    points = [(torch.full((2,), float(n)), torch.tensor(float(n % 3))) for n in range(8)]

    def act(group: Any) -> dict[str, Tensor]:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(float(group.rank))
        trainer = Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            data=MapData(points, global_batch_size=4, micro_batch_size=1),
            updates=1,
            device="cpu",
            strategy=Ordered(group),
            train=Training(ema=Ema(decay=0.5)),
        )
        return {name: value.clone() for name, value in trainer.state_dict()["ema"].items()}

    first, second = on_ranks(2, act)
    assert first["weight"].tolist() == second["weight"].tolist() == [[0.0, 0.0]]
