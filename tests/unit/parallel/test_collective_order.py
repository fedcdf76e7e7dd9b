"""Ranks run the same collectives in each pass, whatever parts each of them runs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep.errors import TaskError
from evenstep.parallel import Group
from evenstep.parallel.collective_order import CollectiveOrder


class Part:
    """Takes collectives as an `FSDPModule` does, and notes what its peers hear."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def set_custom_all_gather(self, collective: Any) -> None:
        self.gather = collective

    def set_custom_reduce_scatter(self, collective: Any) -> None:
        self.reduce = collective


class Own:
    """FSDP2's own collectives."""

    def __init__(self, part: Part) -> None:
        self._all_gather_process_group = None
        self._all_gather_comm = self._of(part, "gather")
        self._reduce_scatter_comm = self._of(part, "reduce")

    def _of(self, part: Part, what: str) -> Any:
        def say(output: Tensor, own: Tensor) -> None:
            part.heard.append(what)

        say.allocate = torch.empty  # type: ignore[attr-defined]
        return say


def listened() -> tuple[CollectiveOrder, Part]:
    order, part = CollectiveOrder(Group()), Part()
    order.add(part, Own(part))
    order.reset()
    return order, part


class Record(Own):
    """FSDP2's record of a part that is gathered and reduced when asked."""

    is_unsharded = False
    fsdp_params = (SimpleNamespace(sharded_param=torch.zeros(1, requires_grad=True)),)

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.part = part

    def wait_for_unshard(self) -> None: ...

    def _to_sharded(self) -> None: ...

    def unshard(self) -> None:
        self.part.gather(torch.zeros(2), torch.zeros(1))

    def post_backward(self) -> None:
        self.part.reduce(torch.zeros(1), torch.zeros(2))


class Noted(Record):
    """Notes the collectives of all parts in one list."""

    def __init__(self, part: Part, name: str, collectives: list[str]) -> None:
        self.name, self.collectives = name, collectives
        super().__init__(part)

    def _of(self, part: Part, what: str) -> Any:
        def say(output: Tensor, own: Tensor) -> None:
            self.collectives.append(f"{what} {self.name}")

        say.allocate = torch.empty  # type: ignore[attr-defined]
        return say


NAMES = ("", "blocks.0", "blocks.1", "blocks.2")


def rank_of(group: Group) -> tuple[CollectiveOrder, list[Part], list[str]]:
    order, parts, collectives = CollectiveOrder(group), [Part() for _ in NAMES], list[str]()
    for part, name in zip(parts, NAMES, strict=True):
        order.add(part, Noted(part, name, collectives), name)
    order.reset("task")
    return order, parts, collectives


def one_pass(order: CollectiveOrder, parts: list[Part], run: list[int]) -> None:
    """Forward and backward through some parts, with reductions."""
    order.begin_forward()
    for number in [0, *run]:
        parts[number].gather(torch.zeros(2), torch.zeros(1))
    order.begin_backward()
    order.arm(armed=True)
    for number in [0, *reversed(run)]:
        parts[number].gather(torch.zeros(2), torch.zeros(1))
        if number:
            parts[number].reduce(torch.zeros(1), torch.zeros(2))
    order.gradients_complete()
    parts[0].reduce(torch.zeros(1), torch.zeros(2))
    order.end_pass()
    order.arm(armed=False)


@pytest.mark.parametrize("runs", [([1, 2], [1, 3]), ([1], [2]), ([], [1, 2, 3]), ([3], [1])])
def test_ranks_that_run_other_parts_run_the_same_collectives(
    on_ranks: Callable[[int, Callable[[Any], Any]], list[Any]], runs: tuple[list[int], list[int]]
) -> None:
    def act(group: Any) -> list[str]:
        order, parts, collectives = rank_of(group)
        for _ in range(2):
            one_pass(order, parts, runs[group.rank])
        return collectives

    first, second = on_ranks(2, act)
    assert first == second


def test_ranks_that_run_all_parts_ask_each_other_in_the_first_pass_only(
    on_ranks: Callable[[int, Callable[[Any], Any]], list[Any]],
) -> None:
    def act(group: Any) -> tuple[int, int, list[str]]:
        order, parts, collectives = rank_of(group)
        one_pass(order, parts, [1, 2, 3])
        before = len(group.said)
        one_pass(order, parts, [1, 2, 3])
        asked = len(group.said) - before
        one_pass(order, parts, [1, 3] if group.rank else [2])  # later, parts may be left out
        return asked, len(group.said) - before, collectives

    first, second = on_ranks(2, act)
    assert first[:2] == (0, 0)
    assert first[2] == second[2]
    assert first[2][: len(first[2]) // 3] * 3 == first[2], "every pass says the same"


def test_a_part_that_comes_out_of_its_order_is_named_before_any_collective(
    on_ranks: Callable[[int, Callable[[Any], Any]], list[Any]],
) -> None:
    def act(group: Any) -> tuple[str, int]:
        order, parts, collectives = rank_of(group)
        one_pass(order, parts, [1, 2, 3])
        said = len(collectives)
        with pytest.raises(TaskError) as raised:
            one_pass(order, parts, [2, 1, 3])
        return str(raised.value), len(collectives) - said

    for message, said in on_ranks(2, act):
        assert "comes to 'blocks.0' in its forward, where the first such pass came to 'blocks.2'" in message
        assert "use `ddp` or `zero1`" in message
        assert said == 3, "what is in no list, blocks.0 in its place, and blocks.1"


def test_gradients_that_come_in_orders_that_can_not_be_joined_are_named(
    on_ranks: Callable[[int, Callable[[Any], Any]], list[Any]],
) -> None:
    def act(group: Any) -> str:
        order, parts, _ = rank_of(group)
        order.begin_forward()
        for number in (0, 1, 2):
            parts[number].gather(torch.zeros(2), torch.zeros(1))
        order.begin_backward()
        order.arm(armed=True)
        with pytest.raises(TaskError) as raised:
            parts[1 + group.rank].reduce(torch.zeros(1), torch.zeros(2))
        return str(raised.value)

    for message in on_ranks(2, act):
        assert "rank 0 with 'blocks.0', rank 1 with 'blocks.1'" in message
