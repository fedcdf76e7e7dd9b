"""Faults of ranks that each hold a part of the model or its state: sharded, in stages, or with the optimizer shared.

Out of memory on one of them: all give the try up together, and the update is made with the same gradient. An error: the
run goes on from its last save. `battery` lists these cases with its own.
"""

import itertools
import tempfile
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from injector import Fault, out_of_memory
from processes import run
from runs import UPDATES, Ended, train
from threads import on_ranks
from torch import Tensor

from evenstep.errors import OutOfMemoryError
from evenstep.events import Save

Checks = list[tuple[str, Callable[[], None], bool]]  # name, check, whether it is slow, as what starts processes
ROUNDED = 1e-13


def ended(ranks: int, faults: list[Fault], **more: Any) -> list[Ended]:
    """How all ranks of a run ended; errors are in it."""
    hooks = more.pop("hooks", [])
    ends = on_ranks(ranks, lambda group: train(group, faults, hooks=[copy(hook) for hook in hooks], **more))
    for end in ends:
        if isinstance(end, Exception):
            raise AssertionError(f"a rank raised {type(end).__name__}: {end}") from end
    return ends


def good(ends: list[Ended]) -> list[Ended]:
    for end in ends:
        if end.error is not None:
            raise AssertionError(f"a rank ended with {type(end.error).__name__}: {end.error}") from end.error
    return ends


@cache
def undisturbed(ranks: int, strategy: str, pipeline: int, schedule: str) -> list[Tensor]:
    ends = good(ended(ranks, [], strategy=strategy, pipeline=pipeline, schedule=schedule))
    return [end.parameters for end in ends]


def stages(phase: str, rank: int, ranks: int, strategy: str, schedule: str, times: int = 1) -> None:
    """Out of memory on one rank of pipelines over two ranks."""
    fault = Fault(act=out_of_memory, phase=phase, update=3, rank=rank, times=times)
    ends = good(ended(ranks, [fault], strategy=strategy, pipeline=2, schedule=schedule))
    assert fault.struck == times, "the fault did not strike"
    for end, wanted in zip(ends, undisturbed(ranks, strategy, 2, schedule), strict=True):
        difference = float((end.parameters - wanted).abs().max())
        assert difference <= ROUNDED, f"the parameters differ by {difference:g}"
        assert end.update == UPDATES
    assert ends[0].kinds.count("out_of_memory") == times, "the first rank must hear of it"


def auto(ranks: int, strategy: str, schedule: str) -> None:
    """The first updates find what fits, which is one sample: the bits of a run with micro-batches of one sample."""
    fault = Fault(act=out_of_memory, phase="backward", rank=None, times=None, larger_than=1)
    what: dict[str, Any] = {"strategy": strategy, "pipeline": 2, "schedule": schedule}
    ends = good(ended(ranks, [fault], micro=4, **what))
    assert fault.struck > 1, "four samples and then two must be tried"
    for end, wanted in zip(ends, good(ended(ranks, [], micro=1, **what)), strict=True):
        assert torch.equal(end.parameters, wanted.parameters), "the bits are others"
    assert ends[0].kinds.count("out_of_memory") >= 2


def no_smaller_piece() -> None:
    """Memory for no piece: both stages stop at once, at the last committed update."""
    fault = Fault(act=out_of_memory, phase="forward", update=3, rank=1, times=None)
    first, second = ended(2, [fault], pipeline=2)
    assert isinstance(second.error, OutOfMemoryError), second.error
    assert "can't be cut any finer" in str(second.error)
    assert "rank 1 failed" in str(first.error), first.error
    assert first.update == second.update == 2


def in_an_evaluation() -> None:
    from battery import evaluation

    fault = Fault(act=out_of_memory, phase="evaluate", rank=1)
    ends = good(ended(2, [fault], pipeline=2, **evaluation()))
    wanted = good(ended(2, [], pipeline=2, **evaluation()))
    values = [end[0].trainer.storage.latest("valid/loss").value for end in (ends, wanted)]  # type: ignore[union-attr]
    assert abs(values[0] - values[1]) < ROUNDED
    assert fault.struck == 1


def raised() -> None:
    raise ValueError("a bug of the user's")


def resumed_from_the_last_save(ranks: int, strategy: str, pipeline: int) -> None:
    """An error on the last rank: no rank holds the whole state, so the run goes on from the last save, bit for bit."""
    fault = Fault(act=raised, phase="forward", update=4, rank=ranks - 1)
    what: dict[str, Any] = {"strategy": strategy, "pipeline": pipeline}
    with tempfile.TemporaryDirectory() as folder:
        ends = ended(ranks, [fault], folder=Path(folder), hooks=[Save(every_updates=2)], **what)
        assert [end.update for end in ends] == [3] * ranks, ends
        assert [path.name for path in Path(folder, "checkpoints").iterdir()] == ["step-00000002"]
        again = good(ended(ranks, [], folder=Path(folder), resume=True, **what))
    for end, wanted in zip(again, undisturbed(ranks, strategy, pipeline, "1f1b"), strict=True):
        assert torch.equal(end.parameters, wanted), "the resumed run ends elsewhere"


# FSDP2 needs processes.


@cache
def undisturbed_processes(strategy: str, ranks: int) -> tuple[list[float], ...]:
    with tempfile.TemporaryDirectory() as folder:
        ends = run(ranks, folder=folder, strategy=strategy)
        assert [end.code for end in ends] == [0] * ranks, ends
        return tuple(end.said["parameters"] for end in ends)


def processes(phase: str, rank: int, strategy: str, ranks: int, kind: str, resumed: bool, bound: float) -> None:
    """A fault on one of several processes; if it ends the run, what the resumed one ends at."""
    with tempfile.TemporaryDirectory() as folder:
        where: dict[str, Any] = {"at": [rank, 4, phase], "let_pass": 0 if phase == "transfer" else 2}  # the third layer
        ends = run(ranks, folder=folder, strategy=strategy, fault=kind, save_every=2, **where)
        if resumed:
            assert {end.said["update"] for end in ends} == {3}, ends
            ends = run(ranks, folder=folder, strategy=strategy, resume=True)
        else:
            assert "out_of_memory" in ends[rank].said["kinds"], ends
        assert [end.code for end in ends] == [0] * ranks, ends
    for end, wanted in zip(ends, undisturbed_processes(strategy, ranks), strict=True):
        difference = max(abs(a - b) for a, b in zip(end.said["parameters"], wanted, strict=True))
        assert difference <= bound, f"the parameters differ by {difference:g}"


CHECKS: Checks = [
    *(
        (
            f"out of memory: {phase}, rank {rank} of {ranks}, pipelines of 2, {schedule}, {strategy}",
            partial(stages, phase, rank, ranks, strategy, schedule),
            number % 4
            in others,  # of four ranks: each phase on the first with one schedule, on the last with the other
        )
        for ranks, strategy, schedule, others in (
            (2, "single", "1f1b", ()),
            (4, "ddp-buckets", "1f1b", (1, 2)),
            (4, "ordered", "zb_h1", (0, 3)),
        )
        for number, (phase, rank) in enumerate(
            itertools.product(("transfer", "forward", "backward", "armed"), (0, ranks - 1))
        )
    ),
    ("micro-batch size auto: a pipeline", partial(auto, 2, "fast", "1f1b"), False),
    ("micro-batch size auto: interleaved stages", partial(auto, 2, "fast", "interleaved"), True),
    ("micro-batch size auto: two pipelines, ddp", partial(auto, 4, "ddp", "zb_h1"), False),
    ("micro-batch size auto: two pipelines, zero1", partial(auto, 4, "zero1", "1f1b"), True),
    ("out of memory: twice in a row, pipeline", partial(stages, "backward", 1, 2, "single", "1f1b", 2), False),
    ("out of memory: one sample, in a stage", no_smaller_piece, False),
    ("out of memory: evaluation, in a stage", in_an_evaluation, False),
    ("error on one rank: zero1", partial(resumed_from_the_last_save, 2, "zero1", 1), False),
    ("error on one rank: pipeline", partial(resumed_from_the_last_save, 2, "single", 2), False),
    ("error on one rank: two pipelines", partial(resumed_from_the_last_save, 4, "ordered", 2), True),
    ("error on one rank: pipelines, zero1", partial(resumed_from_the_last_save, 4, "zero1-ordered", 2), False),
    ("out of memory: backward, pipelines, zero1", partial(stages, "backward", 3, 4, "zero1-ordered", "1f1b"), False),
    *(
        (
            f"out of memory: {phase}, rank {rank} of {ranks} processes, {strategy}",
            partial(processes, phase, rank, strategy, ranks, "out_of_memory", resumed=False, bound=ROUNDED),
            True,
        )
        for phase, rank, strategy, ranks in (
            ("transfer", 1, "fsdp", 2),
            ("forward", 0, "fsdp", 2),
            ("backward", 1, "fsdp", 2),
            ("armed", 0, "fsdp", 2),
            ("armed", 1, "ordered-fsdp", 2),
            ("armed", 3, "fsdp-hybrid", 4),
        )
    ),
    (
        "error on one rank: fsdp",
        partial(processes, "forward", 1, "fsdp", 2, "raise", resumed=True, bound=0.0),
        True,
    ),
]
