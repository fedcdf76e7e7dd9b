"""Faults of ranks that step alone: a loss scale that one of them lowers by itself, and the average of what they share.

Parameters, averages and each rank's scale must be those of the undisturbed run. `battery` lists these cases with its
own.
"""

import tempfile
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from divided import good, raised
from equipped import killed, memory
from injector import Fault
from kits import SET
from runs import UPDATES, Ended, train
from threads import on_ranks

import evenstep
from evenstep import Failures, Fp16Mixed
from evenstep.events import UpdateBegin, UpdateEnd

Checks = list[tuple[str, Callable[[], None], bool]]  # name, check, whether it starts processes
SCALE, FITS, AT = 2.0**10, 2.0**7, 4  # of 10 halvings that there are, 3 let the gradient of an update fit


class Overflows(evenstep.Hook):
    """Makes what a module's backward gives infinite on the second rank: above a loss scale, in one update."""

    def __init__(self, largest: float = FITS) -> None:
        self.largest, self.handles = largest, list[Any]()

    def _poisoned(self, module: Any, inputs: Any, outputs: Any) -> Any:
        scale = self.trainer._loop.engine.precision.scale
        return tuple(one * float("inf") for one in inputs) if scale > self.largest else None

    def before_update(self, event: UpdateBegin) -> None:
        if event.update == AT and not self.trainer.is_first_rank:
            module = self.trainer.model.get_submodule("norm")
            self.handles = [module.register_full_backward_hook(self._poisoned)]

    def after_update(self, event: UpdateEnd) -> None:
        for handle in self.handles:
            handle.remove()


def scales(ends: list[Ended]) -> list[float]:
    return [end.trainer._loop.engine.precision.scale for end in ends]


def ended(strategy: str, *hooks: Overflows, faults: tuple[Fault, ...] = (), **more: Any) -> list[Ended]:
    def one(group: Any) -> Ended:
        precision = Fp16Mixed(initial=SCALE)
        return train(group, faults, strategy=strategy, precision=precision, hooks=[*map(copy, hooks)], **more)

    ends = on_ranks(2, one)
    assert all(isinstance(end, Ended) for end in ends), ends
    return ends


@cache
def undisturbed(strategy: str) -> list[Ended]:
    return good(ended(strategy))


def same(ends: list[Ended], strategy: str) -> None:
    for end, wanted in zip(ends, undisturbed(strategy), strict=True):
        assert end.update == UPDATES
        assert torch.equal(end.parameters, wanted.parameters), "the parameters differ"


def overflow(strategy: str) -> None:
    """The rank makes its update again at lower scales, without the other, and loses nothing."""
    ends = good(ended(strategy, Overflows()))
    same(ends, strategy)
    assert scales(ends) == [SCALE, FITS]
    assert [end.kinds for end in ends] == [["overflow"] * 3] * 2, "the first rank must hear of it"


def overflow_and_error(strategy: str) -> None:
    """What is gone on from has each rank's scale."""
    fault = Fault(act=raised, phase="forward", update=AT + 2, rank=0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = evenstep.Checkpointing(every_updates=1, asynchronous=False)
        kept: dict[str, Any] = {"folder": Path(folder), "checkpoint": checkpoint}
        ends = ended(strategy, Overflows(), faults=(fault,), **kept)
        assert ends[0].error is not None, "the fault did not strike"
        again = good(ended(strategy, resume=True, **kept))
        same(again, strategy)
        assert scales(again) == [SCALE, FITS]


def bad_batch() -> None:
    """No scale mends it: the rank leaves its own step out, and its scale stays."""
    ends = good(ended("local", Overflows(0.0), failures=Failures(non_finite="skip")))
    assert scales(ends) == [SCALE, SCALE]
    assert [end.kinds for end in ends] == [["non_finite"]] * 2
    assert all(bool(end.parameters.isfinite().all()) for end in ends)


CHECKS: Checks = [
    *(
        (
            f"16-mixed, an overflow on rank 1 of 2 alone: nobody loses a step, {strategy}",
            partial(check, strategy),
            False,
        )
        for check, strategy in ((overflow, "local"), (overflow, "local-streamed"))
    ),
    ("16-mixed, an overflow on rank 1 of 2, then an error, local", partial(overflow_and_error, "local"), False),
    ("16-mixed, a bad batch on rank 1 of 2: its step is left out, local", bad_batch, False),
    *(
        (
            f"averages: out of memory, {phase} of update {update}, rank {rank} of 2, {strategy}",
            partial(memory, "averages", phase, update, rank, strategy, 2),
            False,
        )
        for phase, update, rank, strategy in (("forward", SET, 1, "local"), ("armed", SET + 1, 0, "local-streamed"))
    ),
    *(
        (
            f"averages: kill, {phase} of update {update}, rank 1 of 2, {strategy}",
            partial(killed, "averages", phase, update, 1, strategy, 2),
            True,
        )
        for phase, update, strategy in (("backward", SET + 2, "local"), ("after_update", SET, "local-streamed"))
    ),
]
