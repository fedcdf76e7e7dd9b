"""Values between stages: all arrive as they were sent, and those that would hide a gradient are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from evenstep.errors import TaskError
from evenstep.pipeline.wire import Address, Wire, detached

CPU = torch.device("cpu")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Registered:
    x: Any
    mask: Any = None


torch.export.register_dataclass(Registered)


def number(microbatch: int) -> Address:
    return Address("output", 0, 1, microbatch)


TREES: list[Any] = [
    torch.arange(6.0).view(2, 3),
    (torch.ones(2, dtype=torch.bool), None, [torch.tensor(3, dtype=torch.int64)]),
    {"a": Pair(torch.zeros(0, 4), "name"), 3: 2.5},
    torch.ones(3, 2).t(),
    (torch.arange(12.0).view(4, 3)[:, 1:2], torch.arange(6.0).view(2, 3)[:, 0], torch.arange(3.0).expand(2, 3)),
    (torch.ones(5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float64)),
    (torch.tensor([1 + 2j, 3j]).conj(), torch.tensor([1 + 2j, 3j]).conj().imag),
    None,
    (torch.ones(2), 1, "name"),
    (torch.ones(2), True, "name"),
    (Registered(torch.ones(2), torch.ones(2) > 0), 3),
]


def sent_over(group: Any, trees: list[Any], *, runs: int = 1, by_device: bool = False) -> list[list[Any]]:
    """The trees of several runs, as they arrive on the second of two ranks."""
    wire = Wire(group, CPU)
    wire.by_device = by_device
    arrived: list[list[Any]] = []
    for _ in range(runs):
        wire.begin()
        if group.rank == 0:
            for microbatch, tree in enumerate(trees):
                wire.send(number(microbatch), tree, 1)
            wire.flush()
        else:
            arrived.append([wire.receive(number(microbatch), 0) for microbatch in range(len(trees))])
    return arrived


def assert_same(arrived: Any, tree: Any) -> None:
    flat, wanted = (torch.utils._pytree.tree_flatten(each) for each in (arrived, tree))
    assert flat[1] == wanted[1]
    for mine, theirs in zip(flat[0], wanted[0], strict=True):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype
            assert mine.data_ptr() % 64 == 0  # or kernels might round otherwise
        else:
            assert mine == theirs and type(mine) is type(theirs)


@pytest.mark.parametrize("by_device", [False, True])
def test_trees_of_all_forms_and_sizes_arrive_in_their_order(on_ranks: Any, by_device: bool) -> None:
    trees = [*TREES, *TREES, torch.ones(100), torch.ones(3), *reversed(TREES)]
    for run in on_ranks(2, lambda group: sent_over(group, trees, runs=2, by_device=by_device))[1]:
        for arrived, tree in zip(run, trees, strict=True):
            assert_same(arrived, tree)


@dataclass
class Hidden:
    x: Tensor


class Labelled(Tensor):
    """A tensor that may hold more than its numbers."""


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": lambda x: {"h": Hidden(x)},
    "set": lambda x: frozenset([x]),
    "function": lambda x: (x, lambda y: y),
    "subclass": lambda x: {"h": x.as_subclass(Labelled)},
    "packed sequence": lambda x: pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x)), batch_first=True),
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_hide_a_gradient_are_refused(case: str) -> None:
    with pytest.raises(TaskError):
        detached(REFUSED[case](torch.ones(2, 3, requires_grad=True) * 2), "the output")
