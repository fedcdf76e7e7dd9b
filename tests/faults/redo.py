"""Break, meet, redo: processes of which one can't go on, on every strategy and pipeline; and meetings that go wrong.

A run in which a rank runs out of memory must end at the bits of one that cuts as finely from the same update on without
that fault. `battery` lists these cases with its own.
"""

import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

from injector import out_of_memory
from processes import Said, run

from evenstep.errors import LostRankError
from evenstep.parallel import Group
from evenstep.train.cut import SplitLimit
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import TrainContext
from evenstep.train.update.recovery import Recovery
from threads import ends_of_ranks

Checks = list[tuple[str, Callable[[], None], bool]]  # name, check, whether it starts processes
HALF = 10  # numbers in two of a micro-batch's four samples, which is what is left to try after one fault
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp-buckets"},
    "ordered": {"strategy": "ordered"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "ordered fsdp": {"strategy": "ordered-fsdp"},
    "fsdp, every rank holds all": {"strategy": "fsdp-copies"},
    "hybrid": {"strategy": "fsdp-hybrid", "ranks": 4},
    "1f1b": {"pipeline": 2, "schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "zb_v": {"pipeline": 2, "schedule": "zb_v"},
    "fsdp × 1f1b": {"strategy": "fsdp", "pipeline": 2, "ranks": 4},
    "ordered × zb_h1": {"strategy": "ordered", "pipeline": 2, "schedule": "zb_h1", "ranks": 4},
}


def ended(layout: str, **what: Any) -> list[Said]:
    with tempfile.TemporaryDirectory() as folder:
        more = {"strategy": "single", "ranks": 2, "updates": 6, "save_every": 100} | LAYOUTS[layout] | what
        return run(more.pop("ranks"), folder=folder, **more)


@cache
def cut_from(layout: str, update: int) -> tuple[str, ...]:
    """What all ranks end at where they cut as finely as they must after a fault of one."""
    ends = ended(layout, cut=[[0, 1, 2, 3], update, HALF])
    assert [end.code for end in ends] == [0] * len(ends), ends
    return tuple(end.said["sha256"] for end in ends)


def good(ends: list[Said], wanted: tuple[str, ...]) -> None:
    assert [(end.code, end.said.get("sha256")) for end in ends] == [(0, one) for one in wanted], ends


def memory(layout: str, phase: str, rank: int) -> None:
    ends = ended(layout, fault="out_of_memory", at=[rank, 4, phase])
    good(ends, cut_from(layout, 4))
    assert "out_of_memory" in ends[0].said["kinds"], ends


def auto(layout: str) -> None:
    """No two samples ever fit: the bits of a run with micro-batches of one sample."""
    ends = ended(layout, fault="out_of_memory", at=[None, None, "backward"], larger_than=1)
    good(ends, tuple(end.said["sha256"] for end in ended(layout, micro=1)))
    assert "out_of_memory" in ends[0].said["kinds"], ends


def twice_in_a_row() -> None:
    """The second strikes when the update is done again, on another rank."""
    ends = ended("fsdp", faults=[["out_of_memory", 1, 4, "backward", 0], ["out_of_memory", 0, 4, "forward", 3]])
    good(ends, tuple(end.said["sha256"] for end in ended("fsdp", cut=[[0, 1], 4, HALF])))


def _alone_with(group: Group) -> Recovery:
    """The recovery of a run that has nothing but its ranks."""
    context = cast("TrainContext", SimpleNamespace(tasks={}, cuts=SplitLimit()))
    execution = cast("Execution", SimpleNamespace(group=group, reset=lambda: None))
    return Recovery(execution=execution, context=context)


def in_another_work() -> None:
    """Rank 1 is through with what rank 0 breaks off, and in the next update: both stop, and say where the other was."""

    def act(group: Group) -> None:
        recovery = _alone_with(group)
        recovery.once("update 1", out_of_memory if group.rank == 0 else lambda: None)
        recovery.once("update 2", lambda: group.gather("here"))

    first, second = ends_of_ranks(2, act)
    assert isinstance(first, LostRankError) and "rank 1 was in update 2" in str(first), first
    assert isinstance(second, LostRankError) and "rank 0 was in update 1" in str(second), second


def at_the_work_before() -> None:
    """Rank 0 breaks off what the others have not begun: ranks 1 and 2 still exchange what belongs to the one before."""

    def act(group: Group) -> list[list[int]]:
        recovery = _alone_with(group)
        part = group.split([[0], [1, 2]])
        values: list[list[int]] = []

        def before() -> None:
            time.sleep(0.5 * group.rank)
            values.append(part.gather(group.rank))

        def after() -> None:
            if group.rank == 0:
                out_of_memory()
            values.append(group.gather(group.rank))

        recovery.once("update 1", before)
        recovery.once("update 2", after)
        return values

    for rank, end in enumerate(ends_of_ranks(3, act)):
        assert end == [([0], [1, 2])[rank > 0]], end


def both_at_once() -> None:
    """Both ranks break off the same try: each comes to the meeting for its own sake."""
    ends = ended("1f1b", faults=[["out_of_memory", 0, 4, "forward", 0], ["out_of_memory", 1, 4, "forward", 0]])
    assert [end.code for end in ends] == [0, 0], ends


def fails_while_meeting() -> None:
    """Rank 1 waits for rank 0, which raises instead of coming."""
    ends = ended("ddp", faults=[["out_of_memory", 1, 4, "armed", 0], ["late_bug", 0, 4, "forward", 0]])
    assert [end.code for end in ends] == [1, 1], ends
    assert "rank 0 failed in update 4: ValueError" in ends[1].said["error"], ends


def dies_while_meeting() -> None:
    """Rank 1 waits for rank 0, which is killed before it has come."""
    ends = ended(
        "fsdp", faults=[["out_of_memory", 1, 4, "transfer", 0], ["late_kill", 0, 4, "transfer", 0]], timeout_s=60
    )
    assert ends[0].code == -9, ends
    assert "rank 0" in ends[1].said["error"], ends
    assert ends[1].said["error"].startswith("LostRankError"), ends
    assert ends[1].seconds < 50, "it must not wait for the timeout"


CHECKS: Checks = [
    *(
        (f"break, meet, redo: {layout}, {phase}, rank {rank}", partial(memory, layout, phase, rank), True)
        for layout, phase, rank in (
            ("ddp", "armed", 1),
            ("ordered", "backward", 0),
            ("zero1", "forward", 1),
            ("fsdp", "armed", 0),
            ("ordered fsdp", "backward", 1),
            ("fsdp, every rank holds all", "forward", 1),
            ("hybrid", "backward", 3),
            ("1f1b", "backward", 0),
            ("interleaved", "forward", 1),
            ("zb_v", "backward", 1),
            ("fsdp × 1f1b", "backward", 2),
            ("ordered × zb_h1", "forward", 1),
        )
    ),
    ("micro-batch size auto: fsdp", partial(auto, "fsdp"), True),
    ("micro-batch size auto: fsdp × 1f1b", partial(auto, "fsdp × 1f1b"), True),
    ("break, meet, redo: two failures in a row", twice_in_a_row, True),
    ("break, meet, redo: both ranks at once", both_at_once, True),
    ("break, meet, redo: a rank in the update before", at_the_work_before, False),
    ("break, meet, redo: a rank in the next update", in_another_work, False),
    ("break, meet, redo: a failure while meeting", fails_while_meeting, True),
    ("break, meet, redo: a rank dies while meeting", dies_while_meeting, True),
]
