"""A hook that only the first rank hears does what needs all ranks: it is told at once, or by the hook's name."""

import first_rank_programs as programs
import pytest
from launched import on_ranks

SAID = "HookError: `after_update` of hook `Alone` is called on the first rank only (`first_rank_only`), but does what"


@pytest.mark.parametrize("case", ["a forward of shards", "an evaluation", "a norm of shards"])
def test_what_needs_all_ranks_is_refused_at_once_in_a_hook_of_the_first_alone(case: str) -> None:
    (first, *_), (second, *_) = ended = on_ranks(2, programs.outcome, case)
    assert first.startswith(SAID), first
    assert "rank 0 failed in update 2" in second and "first_rank_only" in second, second
    assert all(at_once for _, at_once, _ in ended)


@pytest.mark.parametrize("case", ["a forward of copies", "a forward of shards by all", "an evaluation by all"])
def test_what_needs_nobody_is_done_and_the_advice_works(case: str) -> None:
    is_written = int(case.endswith("by all"))
    assert on_ranks(2, programs.outcome, case) == [(4, True, is_written), (4, True, 0)]


def test_ranks_that_wait_for_a_hook_of_the_first_in_vain_are_told_which_one_it_is() -> None:
    """Nobody can know before that only the first rank comes to it."""
    (first, *_), (second, *_) = on_ranks(2, programs.outcome, "an evaluation if this is the first")
    assert "in update 2, in `after_update` of hook `AtSecond`" in first, (first, second)


@pytest.mark.parametrize(
    "kind, use", [("fsdp", "state_dict"), ("zero1", "state_dict"), ("ddp", "evaluate"), ("ddp", "metrics")]
)
def test_what_the_first_rank_alone_asks_of_an_engine_is_named_on_both(kind: str, use: str) -> None:
    where = f"rank 0 waits to gather values in update 1, in `{use}`; rank 1 waits to gather values in update 2. What"
    for told in on_ranks(2, programs.of_engine, kind, use):
        assert told.startswith("LostRankError") and where in told, told
