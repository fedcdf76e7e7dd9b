from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenstep.parallel.tree import TreeSum

PARAMETERS = [torch.zeros(3), torch.zeros(2, 2)]


def gradients(microbatch: int, present: tuple[bool, bool]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(microbatch)
    made = [torch.randn(p.shape, generator=generator) * 10 ** (microbatch % 5) for p in PARAMETERS]
    return [g if has else None for g, has in zip(made, present, strict=True)]


def in_tree(leaves: list[Any]) -> Any:
    """The sum as the docstring draws it, level by level; None is no summand."""
    while len(leaves) > 1:
        leaves = [*leaves, None] if len(leaves) % 2 else leaves
        leaves = [a if b is None else b if a is None else a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def same(left: Tensor | None, right: Tensor | None) -> bool:
    return right is None if left is None else right is not None and torch.equal(left, right)


@given(
    present=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=13),
    absent=st.sets(st.integers(0, 12)),
    cuts=st.lists(st.integers(0, 13), max_size=3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_sum_has_the_same_bits_whoever_holds_which_microbatches(
    on_ranks: Callable[..., list[Any]], present: list[tuple[bool, bool]], absent: set[int], cuts: list[int]
) -> None:
    count = len(present)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]

    def act(group: Any) -> Any:
        tree = TreeSum(PARAMETERS)
        for microbatch in range(edges[group.rank], edges[group.rank + 1]):
            if microbatch not in absent:  # one without work
                tree.add(microbatch, gradients(microbatch, present[microbatch]))
        return tree.total(group, num_microbatches=count)

    leaves = [[None] * 2 if k in absent else gradients(k, present[k]) for k in range(count)]
    wanted = [in_tree([leaf[part] for leaf in leaves]) for part in range(2)]
    for total in on_ranks(len(edges) - 1, act):
        assert all(same(a, b) for a, b in zip(total, wanted, strict=True))


def test_no_more_than_log_n_plus_one_partial_sums_are_held() -> None:
    tree, most = TreeSum(PARAMETERS), 0
    for microbatch in range(64):
        tree.add(microbatch, gradients(microbatch, (True, True)))
        most = max(most, len(tree.held))
    assert most <= 7


def test_the_case_above_can_fail_another_order_has_other_bits() -> None:
    leaves = [gradients(k, (True, True))[0] for k in range(13)]
    straight = leaves[0]
    for leaf in leaves[1:]:
        straight = straight + leaf  # type: ignore[operator]
    assert not torch.equal(straight, in_tree(leaves))  # type: ignore[arg-type]
