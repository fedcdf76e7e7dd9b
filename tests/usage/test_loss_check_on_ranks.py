"""The loss check on several ranks: all refuse together, and a run that passes keeps its bits."""

import loss_check_programs as programs
import pytest
from launched import Failed, on_ranks

STRATEGIES = ["ddp", "fsdp", "stages", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ordered", "zero1"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mean_is_refused_on_all_ranks_together(strategy: str) -> None:
    for said in on_ranks(2, programs.train, strategy, "mean", True):
        assert isinstance(said, Failed), said
        assert said.startswith("TaskError: the loss of micro-batch")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [12, 4])  # of 4, one rank has no micro-batch
def test_a_run_that_passes_has_the_bits_of_one_without_the_check(strategy: str, size: int) -> None:
    checked = on_ranks(2, programs.train, strategy, "sum", True, size)
    assert not any(isinstance(one, Failed) for one in checked), checked
    assert checked == on_ranks(2, programs.train, strategy, "sum", False, size)
