from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.contrib.elastic import Elastic, ElasticRank
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Group, Strategy, Zero1


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Lonely:
    """A lighthouse that sees one of two."""

    name = "0"

    def __init__(self, number: int = 0) -> None:
        self.place = ElasticRank(number=number, count=2, lighthouse="http://localhost:1")

    def close(self) -> None: ...


def trainer(
    strategy: Callable[[Group], Strategy], data: Any, *, number: int = 0, folder: Path | None = None
) -> evenstep.Trainer:
    model = nn.Linear(1, 1)
    lighthouse: Any = Lonely(number)
    return evenstep.Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=data,
        updates=1,
        device="cpu",
        strategy=strategy(Elastic(lighthouse, timeout_s=1)),
        folder=folder,
    )


def test_a_stream_cannot_be_redistributed() -> None:
    with pytest.raises(ArgumentError):
        trainer(Ddp, evenstep.StreamData(range(4), global_batch_size=2))


def test_ranks_that_hold_parts_of_the_state_cannot_be_lost() -> None:
    data = evenstep.MapData([(torch.ones(1), torch.ones(1))], global_batch_size=1)
    with pytest.raises(ArgumentError):
        trainer(lambda group: Zero1(group, reduction="fast"), data)
    assert trainer(Ddp, data).updates == 1


def test_a_process_that_has_not_met_the_first_one_resumes_from_nothing(tmp_path: Path) -> None:
    data = evenstep.MapData([(torch.ones(1), torch.ones(1))], global_batch_size=1)
    assert trainer(Ddp, data, number=1, folder=tmp_path).resume("auto") is None
