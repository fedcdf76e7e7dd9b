"""A user lets activations be computed again in the backward: the same bits on every layout."""

from typing import Any

import layouts_programs as programs
import pytest
from test_layouts import alike, on

PARTS = ("parameters", "optimizer", "ema", "valid", "local")
SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zb_v")


RECOMPUTED = [model for model in programs.MODELS if model != "spectral"]  # its forward writes a buffer: refused


@pytest.mark.parametrize("model", RECOMPUTED)
def test_it_is_the_same_run_whatever_the_forward_draws_from_and_moves(model: str) -> None:
    """Keys of layers, Python's and numpy's generators, running statistics."""
    kept = programs.train(model, ema=True)
    assert alike(programs.train(model, ema=True, checkpoint="*"), kept, parts=PARTS)


def both(model: str, **layout: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(model, {"ema": True, **layout, "checkpoint": which}) for which in ("none", "*")]


def assert_same(ranks: int, ways: list[tuple[str, dict[str, Any]]]) -> None:
    for each in on(ranks, *ways):
        for place in range(0, len(ways), 2):
            assert alike(each[place], each[place + 1], parts=PARTS), ways[place]


def test_it_is_the_same_run_on_two_ranks() -> None:
    strategies = ("ddp", "zero1", "ordered-fsdp")  # the others with stages, below
    assert_same(2, [way for strategy in strategies for way in both("Net", strategy=strategy)])


def test_shards_within_a_module_are_gathered_for_its_recomputation() -> None:
    ways = [
        ("Nested", {"strategy": strategy, "batch": 6, "checkpoint": which})
        for strategy in ("fsdp", "ordered-fsdp")
        for which in ("none", "encoder")
    ]
    assert_same(2, ways)  # of 3 micro-batches the ranks have 2 and 1, and a pass that counts nowhere


def test_it_is_the_same_run_in_stages_with_backwards_in_one_piece_and_in_two() -> None:
    ways = [way for schedule in ("interleaved", "zb_h1") for way in both("Net", pipeline=2, schedule=schedule)]
    assert_same(2, [*ways, *both("shared_dropout", pipeline=2), *both("normed", pipeline=2)])


def test_only_repeated_blocks_of_stages_are_the_same_run_as_one_process_keeps_whole() -> None:
    alone = programs.train("Net", ema=True)
    first, _ = on(2, ("Net", {"ema": True, "pipeline": 2, "checkpoint": "blocks"}))  # the first rank has the whole
    assert alike(first[0], alone)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_the_same_run_in_stages_with_replicas(schedule: str) -> None:
    strategies = ("ddp", "ordered", "ordered-zero1", "fsdp", "ordered-fsdp")
    layouts = [{"pipeline": 2, "schedule": schedule, "strategy": strategy} for strategy in strategies]
    assert_same(4, [way for layout in layouts for model in ("Net", "normed") for way in both(model, **layout)])
