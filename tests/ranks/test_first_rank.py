"""A hook that only the first rank hears does what needs all ranks: it is told at once, or by the hook's name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import ended, started

SCRIPT = Path(__file__).with_name("first_rank_checks.py")
SAID = "HookError: `after_update` of hook `Alone` is called on the first rank only (`first_rank_only`), but does what"


@pytest.fixture
def found(found_by: Callable[..., Any]) -> Any:
    return found_by("first_rank_checks.py", 2, "known")


@pytest.mark.parametrize("case", ["a forward of shards", "an evaluation", "a norm of shards"])
def test_what_needs_all_ranks_is_refused_at_once_in_a_hook_of_the_first_alone(found: Any, case: str) -> None:
    (first, second), _ = found
    assert first[case][0].startswith(SAID), first[case]
    assert "rank 0 failed in update 2" in second[case][0] and "first_rank_only" in second[case][0], second[case]
    assert first[case][1] and second[case][1], "the others waited for it"


def test_what_needs_nobody_is_done_and_the_advice_works(found: Any) -> None:
    (first, second), written = found
    for case in ("a forward of copies", "a forward of shards by all", "an evaluation by all"):
        assert first[case] == second[case] == [4, True], case
    assert written == 2


def test_ranks_that_wait_for_a_hook_of_the_first_in_vain_are_told_which_one_it_is(tmp_path: Path) -> None:
    """Nobody can know before that only the first rank comes to it."""
    first, second = ended(started(SCRIPT, tmp_path, "unknown", ranks=range(2), world=2), 60)
    said = [json.loads(one.out.splitlines()[-1])[0] for one in (first, second)]
    assert any("in `after_update` of hook `AtSecond`" in one for one in said), said
