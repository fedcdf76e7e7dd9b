"""The guard of normalisation on several ranks: all refuse together, and a run that passes has its own bits."""

import guard_programs as programs
import pytest
from launched import Failed, on_ranks

STRATEGIES = ["ddp", "fsdp", "stages", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ordered", "zero1"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mean_is_refused_on_all_ranks_together(strategy: str) -> None:
    for said in on_ranks(2, programs.train, strategy, "mean", True):
        assert isinstance(said, Failed), said
        assert said.startswith("TaskError: the loss of micro-batch 0 (4 samples) is ") and "gives a mean" in said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_passes_has_the_bits_of_one_without_the_guard(strategy: str) -> None:
    looked = on_ranks(2, programs.train, strategy, "sum", True)
    assert not any(isinstance(one, Failed) for one in looked), looked
    assert looked == on_ranks(2, programs.train, strategy, "sum", False)


def test_a_shard_without_a_micro_batch_takes_part_when_attributes_are_looked_at() -> None:
    ended = on_ranks(2, programs.train, "fsdp", "sum", True, 4)
    assert not any(isinstance(one, Failed) for one in ended), ended
    assert ended == on_ranks(2, programs.train, "fsdp", "sum", False, 4)


def test_attributes_are_looked_at_where_no_shard_has_anything_to_run_of_a_task() -> None:
    assert on_ranks(2, programs.train_beside_weight_0, "fsdp") == [3, 3]
