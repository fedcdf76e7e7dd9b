"""A user trains in each number format: on one process and on several, cut anyhow, stopped and resumed elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import formats_programs as programs
import pytest
import torch
from launched import Failed, on_ranks

TOO_MUCH = 2.0**24  # for a loss scale: it is halved until gradients of 16 bits are finite
SAME = ("model", "optimizer", "ema", "precision", "valid", "saved as")


def on(ranks: int, *ways: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first rank has of each way."""
    results = on_ranks(ranks, programs.run_each, list(ways), timeout_s=300)
    assert not [one for one in results if isinstance(one, Failed)], results
    return results[0]


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[part] == other[part] for part in SAME)


def held_as(name: str, *, sharded: bool = False) -> list[str]:
    own = f"torch.{'bfloat16' if name.startswith('bf16') else 'float16'}"
    # shards are the masters; a single number is whole on each rank
    return [own, "torch.float32"] if sharded and "no-master" not in name else [own]


def test_each_format_has_the_bits_of_one_process_with_every_strategy_that_is_ordered() -> None:
    strategies = ("ordered", "ordered-zero1", "ordered-fsdp")
    ways = [(name, {"strategy": strategy}) for name in programs.FORMATS for strategy in strategies]
    found = on(2, *ways)
    for name in programs.FORMATS:
        alone = programs.train(name)
        for (way, arguments), one in zip(ways, found, strict=True):
            if way == name:
                assert alike(one, alone), (name, arguments)
                assert one["held as"] == held_as(name, sharded=arguments["strategy"] == "ordered-fsdp")
                share = 1.0 if arguments["strategy"] == "ordered" else 0.6  # of the masters, on the first of two ranks
                assert one["masters"] <= share * alone["masters"]


def has_the_bits_of_one_process(names: Sequence[str], ranks: int, shared: list[dict[str, Any]]) -> None:
    """Formats, in each of some ways to share a model with tied weights among so many ranks."""
    ways = [(name, {"tied": True, **more}) for name in names for more in shared]
    found = on(ranks, *ways)
    for name in names:
        alone = programs.train(name, tied=True)
        assert all(alike(one, alone) for (way, _), one in zip(ways, found, strict=True) if way == name), name


def test_each_format_has_the_bits_of_one_process_in_stages_with_tied_weights() -> None:
    has_the_bits_of_one_process(programs.FORMATS, 2, [{"pipeline": 2}, {"pipeline": 2, "schedule": "zb_h1"}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("bf16-true", "16-true-no-master"), pytest.param(("16-true", "bf16-true-no-master"), marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_formats_have_the_bits_of_one_process_in_stages_and_shards_with_replicas(names: tuple[str, str]) -> None:
    has_the_bits_of_one_process(
        names,
        4,
        [
            {"pipeline": 2, "strategy": "ordered-fsdp"},
            {"pipeline": 2, "strategy": "ordered-zero1"},
            {"strategy": "ordered-hybrid"},
        ],
    )


@pytest.mark.parametrize("name", ["16-true", pytest.param("16-true-no-master", marks=pytest.mark.slow)])
def test_an_overflow_is_one_on_all_ranks_and_stages_and_nothing_else_notices(name: str) -> None:
    """The verdict, and the scale that is found, are those of one process; and so are all bits."""
    scaled: list[dict[str, Any]] = [
        {"tied": True, "pipeline": pipeline, "strategy": strategy, "scale": TOO_MUCH}
        for pipeline, strategy in ((1, "ordered"), (2, "ordered"), (1, "ordered-fsdp"))
    ]
    found = on(2, *((name, more) for more in scaled))
    alone = programs.train(name, tied=True, pipeline=1, scale=TOO_MUCH)
    assert alone["precision"]["scale"] < TOO_MUCH
    assert all(alike(one, alone) for one in found)


@pytest.mark.slow
def test_each_format_is_stopped_and_resumed_on_other_layouts_with_the_same_bits(tmp_path: Path) -> None:
    for name in programs.FORMATS:
        programs.train(name, folder=str(tmp_path / name), until=1)
    steps = (("ordered-fsdp", 2), ("ordered-zero1", 3))
    ways = [
        (name, {"strategy": strategy, "folder": str(tmp_path / name), "until": until})
        for strategy, until in steps
        for name in programs.FORMATS
    ]
    on(2, *ways)
    for name in programs.FORMATS:
        assert alike(programs.train(name, folder=str(tmp_path / name)), programs.train(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_each_format_trains_alike_where_sums_are_fast(strategy: str) -> None:
    found = on(2, *((name, {"strategy": strategy}) for name in programs.FORMATS))
    for name, one in zip(programs.FORMATS, found, strict=True):
        alone = torch.tensor(programs.train(name)["values"])
        assert float((torch.tensor(one["values"]) - alone).norm()) <= 0.05 * float(alone.norm()), name
