"""The launching that the batteries stand on: results, errors and hangs are told apart."""

import launched_programs as programs
from launched import Failed, on_ranks


def test_ranks_give_their_results_in_order() -> None:
    assert on_ranks(2, programs.add_up, 1.5) == [(0, 4.5), (1, 4.5)]


def test_a_rank_that_raises_or_hangs_or_dies_is_a_failure_with_its_reason() -> None:
    good, bad = on_ranks(2, programs.raise_on_rank_1)
    assert good == 0 and not isinstance(good, Failed)
    assert isinstance(bad, Failed) and bad == "ValueError: rank 1 does not like it"
    quick, hung = on_ranks(2, programs.sleep_on_rank_1, timeout_s=3)
    assert quick == 1 and isinstance(hung, Failed) and hung.startswith("hung")
    [dead] = on_ranks(1, programs.exit_at_once)
    assert isinstance(dead, Failed) and dead.startswith("exit 3")
