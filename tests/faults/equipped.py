"""Faults of runs with parameter groups, averages and quantisation: before, at and after what changes at set updates.

Parameters and averages must be those of the undisturbed run, out of memory or killed and gone on with. `battery` lists
these cases with its own.
"""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from divided import ended, good, raised
from injector import Fault, out_of_memory
from kits import KITS, SET
from processes import run
from runs import UPDATES, Ended

Checks = list[tuple[str, Callable[[], None], bool]]  # name, check, whether it is slow, as what starts processes
STAGES = "stages, zb_h1"
ROUNDED = {torch.float64: 1e-12, torch.float32: 1e-5}  # a finer cut adds up in another order


def layout(strategy: str) -> dict[str, Any]:
    """What a run needs for ranks to share it so."""
    if strategy == STAGES:
        return {"strategy": "ordered", "pipeline": 2, "schedule": "zb_h1"}
    return {"strategy": strategy}


@cache
def undisturbed(kit: str, strategy: str, ranks: int) -> list[Ended]:
    return good(ended(ranks, [], kit=kit, **layout(strategy)))


def same(ends: list[Ended], kit: str, strategy: str, bound: float) -> None:
    for end, wanted in zip(ends, undisturbed(kit, strategy, len(ends)), strict=True):
        assert end.update == UPDATES
        for what in ("parameters", "average"):
            a, b = getattr(end, what), getattr(wanted, what)
            difference = float((a - b).abs().max()) if len(a) else 0.0
            assert difference <= bound, f"{what} differ by {difference:g}"
        for a, b in zip(end.buffers, wanted.buffers, strict=True):
            assert a.is_floating_point() or torch.equal(a, b), "blocks are assigned otherwise"


def memory(kit: str, phase: str, update: int, rank: int, strategy: str, ranks: int) -> None:
    """Out of memory on one rank: the update is made with a finer cut."""
    fault = Fault(act=out_of_memory, phase=phase, update=update, rank=rank)
    ends = good(ended(ranks, [fault], kit=kit, **layout(strategy)))
    assert fault.struck == 1, "the fault did not strike"
    same(ends, kit, strategy, ROUNDED[KITS[kit].dtype])
    assert "out_of_memory" in ends[0].kinds, "the first rank must hear of it"


def left(kit: str, phase: str, update: int, strategy: str, ranks: int) -> None:
    """An error on the last rank: what the ranks save then is gone on from, to the same bits."""
    fault = Fault(act=raised, phase=phase, update=update, rank=ranks - 1)
    with tempfile.TemporaryDirectory() as folder:
        ends = ended(ranks, [fault], kit=kit, **layout(strategy), folder=Path(folder))
        assert ends[-1].error is not None, "the fault did not strike"
        assert [end.update for end in ends] == [update if phase == "after_update" else update - 1] * ranks
        same(good(ended(ranks, [], kit=kit, **layout(strategy), folder=Path(folder), resume=True)), kit, strategy, 0.0)


@cache
def digests(kit: str, strategy: str, ranks: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        ends = run(ranks, folder=folder, kit=kit, **layout(strategy))
        assert [end.code for end in ends] == [0] * ranks, ends
        return [end.said["sha256"] for end in ends]


def killed(kit: str, phase: str, update: int, rank: int, strategy: str, ranks: int) -> None:
    """A rank is killed: the others say so, and the run goes on from its last checkpoint, to the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        what: dict[str, Any] = {"fault": "kill", "at": [rank, update, phase]}
        ends = run(ranks, folder=folder, kit=kit, **layout(strategy), **what)
        assert ends[rank].code == -9, ends
        assert all("is gone" in end.said["error"] for number, end in enumerate(ends) if number != rank), ends
        again = run(ranks, folder=folder, kit=kit, **layout(strategy), resume=True)
        assert [end.code for end in again] == [0] * ranks, again
        assert [end.said["sha256"] for end in again] == digests(kit, strategy, ranks)


def refused() -> None:
    """Muon looks at whole matrices: it does not begin on shards."""
    with tempfile.TemporaryDirectory() as folder:
        ends = run(2, folder=folder, strategy="fsdp", kit="Muon and AdamW")
        assert all(end.code == 1 and "Muon" in end.err for end in ends), ends


def others_show_it(kit: int, place: int) -> bool:
    """Each kit meets one of three faults, and each fault two kits, also where the slow cases are left out."""
    return (kit + place) % 3 > 0


AROUND = (("before_update", SET), ("forward", SET + 1), ("after_update", SET + 1))
CHECKS: Checks = [
    *(
        (
            f"{kit}: out of memory, {phase} of update {update}, rank {rank} of {ranks}, {strategy}",
            partial(memory, kit, phase, update, rank, strategy, ranks),
            others_show_it(number, place),
        )
        for number, kit in enumerate(KITS)
        for place, (phase, update, rank, strategy, ranks) in enumerate(
            (
                ("backward", SET, 0, "single", 1),
                ("forward", SET + 1, 1, "ddp-buckets", 2),
                ("armed", SET + 2, 0, "zero1-ordered", 2),
            )
        )
    ),
    *(
        (
            f"{kit}: an error on one rank, {phase} of update {update}, {strategy}",
            partial(left, kit, phase, update, strategy, ranks),
            others_show_it(number + 1, place),
        )
        for number, kit in enumerate(KITS)
        for place, ((phase, update), (strategy, ranks)) in enumerate(
            zip(AROUND, (("single", 1), ("zero1-ordered", 2), ("ordered", 2)), strict=True)
        )
    ),
    *(
        (
            f"{kit}: kill, {phase} of update {update}, rank {rank} of 2, {strategy}",
            partial(killed, kit, phase, update, rank, strategy, 2),
            True,
        )
        for kit, phase, update, rank, strategy in (
            ("Muon and AdamW", "backward", SET + 1, 1, "zero1-ordered"),
            ("decay by layer", "forward", SET + 1, 1, "fsdp"),
            ("averages", "armed", SET + 2, 1, "fsdp"),
            ("what is frozen at first", "before_update", SET + 1, 1, "ordered-fsdp"),
            ("fake quantisation", "after_update", SET, 1, "ordered-fsdp"),
            ("fake quantisation", "forward", SET + 1, 1, "fsdp"),
            ("fake quantisation", "forward", SET + 1, 1, STAGES),
        )
    ),
    ("Muon: refused on shards, on all ranks", refused, True),
]
