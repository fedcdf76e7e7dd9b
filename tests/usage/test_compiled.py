"""A user compiles the model of a run on several ranks."""

import math

import compiled_programs as programs
import pytest
from launched import Failed, on_ranks

TOGETHER = [("ddp", 2), ("ordered", 2), ("zero1", 2), ("fsdp", 2), ("ordered-fsdp", 2), ("hybrid", 4)]


def trained(ranks: int, strategy: str, compile: str, schedule: str = "", dropout: bool = True) -> list[float]:
    results = on_ranks(ranks, programs.parameters, strategy, compile, schedule, dropout, timeout_s=400)
    assert not [one for one in results if isinstance(one, Failed)], results
    return results[0]


def distance(one: list[float], other: list[float]) -> float:
    return math.dist(one, other) / math.hypot(*other)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), TOGETHER)
def test_a_compiled_model_is_trained_with_each_strategy(strategy: str, ranks: int) -> None:
    assert distance(trained(ranks, strategy, "model"), trained(ranks, strategy, "off")) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_updates_compiled_as_a_whole_on_several_ranks_are_those_that_are_not(ranks: int) -> None:
    compiled = trained(ranks, "ddp", "update", dropout=False)
    assert distance(compiled, trained(1, "single", "off", dropout=False)) < 1e-6
    assert compiled == trained(ranks, "ddp", "update", dropout=False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_compiled_layers_in_stages_on_two_ranks_have_the_bits_of_one_process(schedule: str) -> None:
    assert trained(2, "ordered", "model", schedule) == trained(1, "ordered", "model")
