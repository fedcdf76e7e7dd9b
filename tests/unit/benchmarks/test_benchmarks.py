"""Benchmarks at toy size: contenders take turns and do the same work, or are found out; bounds give exit codes."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu
from contenders.bare import train_ordinary, train_tuned
from contenders.evenstep_ import train as train_evenstep
from harness.rounds import interleave
from harness.row import Row, Times, compared
from harness.work import mlp


def test_the_plain_loops_and_evenstep_come_to_the_same_parameters() -> None:
    contenders = {"tuned": train_tuned, "ordinary": train_ordinary, "evenstep": train_evenstep}
    times = interleave(contenders, mlp(num_microbatches=2), chunk_updates=20, rounds=2)
    assert {name: len(one.cpu_s) for name, one in times.items()} == {"tuned": 2, "ordinary": 2, "evenstep": 2}


def test_the_ratio_is_the_median_over_rounds_of_the_ratios_within_a_round() -> None:
    # Everything took ten times as long in the second round, which must not show.
    contender, reference = Times([2.0, 20.0, 3.0, 3.0], [4.0] * 4), Times([1.0, 10.0, 1.0, 1.0], [1.0] * 4)
    made = compared("work", "x", contender, reference, unit="ms", per_s=1e3, bound=2.4)
    assert (made.ratio, made.spread, made.wall_ratio, made.median, made.ok) == (2.5, 1.0, 4.0, 3000.0, False)


def row(ratio: float, bound: float | None) -> Row:
    return Row(case="work", contender="x", median=2.0, unit="s", ratio=ratio, spread=0.1, wall_ratio=1.0, bound=bound)


def test_rows_of_a_gpu_are_made_at_toy_size() -> None:
    rows = gpu.gpt_step(gpu.TOY, torch.device("cpu"), peers=False)
    assert [one.contender for one in rows if one.bound is not None] == ["evenstep"]
    assert len(gpu.saves(gpu.TOY, torch.device("cpu"))) == 3


def test_all_tests_on_a_device_are_in_a_stage() -> None:
    folder = Path(__file__).parents[2] / "gpu"
    text = (folder / "run.py").read_text()  # not imported: `run` is also the name of the benchmarks' own
    assert [one.name for one in folder.glob("test_*.py") if f'"{one.name}"' not in text] == []
