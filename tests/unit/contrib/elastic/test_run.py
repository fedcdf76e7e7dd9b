from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.contrib.elastic import Elastic, ElasticRank
from evenstep.contrib.elastic.run import shared
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Group, Strategy, Zero1

TREE: dict[str, Any] = {
    "float": torch.tensor([1.5, -0.0, float("nan")]),
    "half": [torch.ones(2, 3, dtype=torch.bfloat16), {"step": torch.tensor(7.0)}],
    "bool": (torch.tensor([True, False]), None, "text"),
    "empty": torch.empty(0, 4, dtype=torch.int64),
    "across": torch.arange(6.0).view(2, 3).T,
}


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Lonely:
    """A lighthouse that sees one of two."""

    name = "0"

    def __init__(self, number: int = 0) -> None:
        self.place = ElasticRank(number=number, count=2, lighthouse="http://localhost:1")

    def close(self) -> None: ...


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(9), other.nan_to_num(9))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_tree_of_one_rank_is_on_all(on_ranks: Callable[..., Any]) -> None:
    got = on_ranks(3, lambda group: shared(group, TREE if group.rank == 1 else None, 1))
    assert all(same(TREE, one) for one in got)


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


def test_a_stream_cannot_be_dealt_anew() -> None:
    with pytest.raises(ArgumentError):
        trainer(Ddp, evenstep.StreamData(range(4), global_batch_size=2))


def test_ranks_that_hold_parts_of_the_state_cannot_be_lost() -> None:
    data = evenstep.MapData([(torch.ones(1), torch.ones(1))], global_batch_size=1)
    with pytest.raises(ArgumentError):
        trainer(lambda group: Zero1(group, reduction="fast"), data)
    assert trainer(Ddp, data).is_first_rank


def test_a_process_that_has_not_met_the_first_one_resumes_from_nothing(tmp_path: Path) -> None:
    data = evenstep.MapData([(torch.ones(1), torch.ones(1))], global_batch_size=1)
    assert trainer(Ddp, data, number=1, folder=tmp_path).resume("auto") is None
