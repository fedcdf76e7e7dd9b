"""Processes that are lost and come back, with torchft's lighthouse: the bits of one undisturbed process."""

import pytest
from lost import UPDATES, ran


@pytest.mark.timeout(280)
def test_processes_killed_in_the_middle_of_updates_leave_no_trace_in_the_parameters() -> None:
    one = ran(count=1)[0]
    said = ran(count=3, hits=[[1, 3, "loss", "SIGKILL"], [0, 8, "loss", "SIGKILL"], [2, 12, "evaluate", "SIGKILL"]])
    assert [(each["number"], each["error"], each["update"]) for each in said] == [(n, "", UPDATES) for n in range(3)]
    assert {each["sha256"] for each in said} == {one["sha256"]}
    # the process that was killed first, and came back, has heard of both others, and all of the last
    assert "process 0 is lost" in str(said[1]["heard"])
    assert all("process 2 is lost" in str(each["heard"]) for each in said[:2])
