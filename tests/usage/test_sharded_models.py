"""Models that use their modules in unusual ways train under `fsdp` to the bits of one process."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import sharded_programs as programs
from launched import Failed, on_ranks
from sharded_models_nets import NETS

FAST = ("Memory", "Reentrant", "Albert", "AlbertInARow", "ListsAsItems")
ALL = tuple(NETS)


@cache
def trained(ranks: int, nets: tuple[str, ...], strategies: tuple[str, ...]) -> dict[str, Any]:
    """What the first rank has, after all ranks were found to have the same."""
    found = on_ranks(ranks, programs.train_all, nets, strategies, timeout_s=600)
    assert not [one for one in found if isinstance(one, Failed)], found
    assert all(one == found[0] for one in found), "ranks have the same parameters"
    return found[0]


def apart(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """The largest difference, in parts of the largest value of the model."""
    largest = max(abs(value) for values in theirs.values() for value in values)
    pairs = [(a, b) for name in theirs for a, b in zip(ours[name], theirs[name], strict=True)]
    return max(abs(a - b) for a, b in pairs) / largest


def check(ranks: int, nets: Sequence[str], strategies: tuple[str, ...]) -> None:
    wanted, found = trained(1, tuple(nets), ("ordered",)), trained(ranks, tuple(nets), strategies)
    for strategy in strategies:
        for net in nets:
            digest, values = found[strategy, net]
            if strategy.startswith("ordered"):
                assert digest == wanted["ordered", net][0], f"{net} has other bits with {strategy} on {ranks} ranks"
            assert apart(values, wanted["ordered", net][1]) < 1e-9, f"{net} with {strategy} on {ranks} ranks"


def test_kinds_of_models_in_shards_have_the_bits_of_one_process() -> None:
    check(2, FAST, ("ordered-fsdp",))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("ranks", "strategies"), [(2, ("ordered-fsdp", "fsdp")), (4, ("ordered-fsdp", "fsdp"))])
def test_all_kinds_of_models_in_shards_have_the_bits_of_one_process(ranks: int, strategies: tuple[str, ...]) -> None:
    check(ranks, ALL, strategies)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_kinds_of_models_in_copies_of_shards_have_the_bits_of_one_process() -> None:
    check(4, ALL, ("ordered-hybrid", "hybrid"))


@pytest.mark.parametrize("strategy", ["fsdp", "ordered-fsdp"])
def test_ranks_that_call_other_blocks_are_refused(strategy: str) -> None:
    found = on_ranks(2, programs.train_all, ("Experts",), (strategy,))
    assert all(isinstance(one, Failed) and one.startswith("TaskError") for one in found), found


def test_items_may_give_back_what_they_get_and_outputs_be_needed_only_later() -> None:
    check(2, ("Skipping", "NeededLater"), ("ordered-fsdp", "fsdp"))


def test_sixteen_bit_gathers_train_a_parameter_that_some_micro_batch_does_not_use() -> None:
    ours, theirs = on_ranks(2, programs.train_gathered_in_16_bits), on_ranks(1, programs.train_gathered_in_16_bits)
    assert ours[0] == ours[1]
    assert apart(ours[0], theirs[0]) < 0.02, "up to the rounding of 16-bit products"
