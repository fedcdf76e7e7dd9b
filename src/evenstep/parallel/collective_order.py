"""One order of FSDP2's collectives on all ranks: which parts of a model a pass gathers and reduces, and when.

A collective does not carry what it is about: where one rank gathers a part and another the next one, equal sizes give
wrong numbers in silence, and others end the process. So the collectives of a pass follow one sequence. In the first
pass of a kind, the ranks tell each other before each collective which one they need next, and agree on it; a rank that
does not need it takes part in it all the same. If all ranks have run all parts alike, later passes follow the same
sequence: before a rank runs a collective it takes part in those that come before it, of parts that it leaves out, and
one that the sequence has no longer, or not at all, is an error. That costs one comparison per collective. If they have
not, because items of lists are chosen by the batch or at random, they agree on each collective of each pass.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evenstep.errors import TaskError
from evenstep.internals.fsdp import collectives, end_backward, gather_now, reduce_now
from evenstep.parallel.group import Group


class Collective(NamedTuple):
    """A collective of one part, by its number."""

    reduces: bool
    part: int


class Coming(NamedTuple):
    """What a rank comes to next.

    Args:
        collective: None at the end of a phase.
        running: parts that have gone forward here, and whose gradients are still to come.
    """

    collective: Collective | None
    running: frozenset[int]


@final
@dataclass(slots=True)
class _Sequence:
    """The collectives of passes of one kind, in one phase.

    Args:
        collectives: of all such passes; of this one only while it is open.
        open: whether ranks still agree on each.
        alike: whether all of them have come to each at once.
        ended: whether all of them have come to the end.
    """

    collectives: list[Collective] = field(default_factory=list[Collective])
    open: bool = True
    alike: bool = True
    ended: bool = False


class _Part(NamedTuple):
    name: str
    module: Any
    record: Any


@final
class CollectiveOrder:
    """The order of the collectives of one rank's passes.

    Attributes:
        armed: whether gradients are reduced in the backward that comes.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.armed = False
        self._parts: list[_Part] = []
        self._alone = False
        self._sequences: dict[tuple[str, str], _Sequence] = {}
        self._kind = ""
        self._phase = ""  # "forward", "backward", or between passes
        self._comes_back = False
        self._sequence = _Sequence(open=False, ended=True)
        self._place = 0  # in the sequence
        self._expected = False  # the forward of this pass, by that of the first
        self._standing_in = False
        self._in_step = False
        self._begun: set[tuple[str, str]] = set()  # sequences, in this pass
        self._running: set[int] = set()
        self._reduced: set[int] = set()  # parts whose gradients are reduced in this pass

    def add(self, part: Any, record: Any, name: str = "", *, alone: bool = False) -> None:
        """Let the collectives of `part` be run in order.

        Args:
            part: an `FSDPModule`; the outermost one first.
            alone: whether each rank holds all of it.
        """
        number, self._alone = len(self._parts), alone
        gather, reduce = collectives(record)
        part.set_custom_all_gather(_InOrder(self, gather, Collective(False, number)))
        part.set_custom_reduce_scatter(_InOrder(self, reduce, Collective(True, number), sums_whole=alone))
        self._parts.append(_Part(name=name, module=part, record=record))
        if alone:  # nothing is gathered, which would tell it

            def going(*_: Any) -> None:
                self._goes_forward(number)

            part.register_forward_pre_hook(torch.compiler.disable(going))

    def reset(self, kind: str = "") -> None:
        """No pass of this kind has begun yet; the collectives that an earlier one still had to run are dropped."""
        self._phase = ""
        self._kind = kind
        self._reduced.clear()

    def forget(self) -> None:
        """Other parameters are trained from now on, so passes go otherwise: all ranks agree on their sequences anew."""
        self._sequences.clear()
        self._sequence = _Sequence(open=False, ended=True)

    def begin_forward(self) -> None:
        """A pass begins, with its forward."""
        self.end_pass()
        self._begun.clear()
        self._reduced.clear()
        self._running.clear()
        self._comes_back = torch.is_grad_enabled()
        self._enter("forward", f"{self._kind}/{self._comes_back}")

    def begin_backward(self) -> None:
        """The forward of the pass has ended."""
        self._catch_up(None)
        self._expected = not self._sequence.open
        self._enter_backward()

    def arm(self, *, armed: bool, of_next: bool = False) -> None:
        """Gradients are reduced in the backward that comes, or not.

        Args:
            of_next: whether that is the backward of a pass that has not begun.
        """
        self.armed = armed
        if self._phase == "backward" and not self._place and not of_next:
            self._enter_backward()

    def _enter_backward(self) -> None:
        self._enter("backward", f"{self._kind}/{self._comes_back}/{self.armed}")

    def end_pass(self) -> None:
        """Run what is left of the last pass: this rank's backward has ended. All ranks come here between passes."""
        if self._phase == "backward":
            self._running.clear()
            before = len(self._reduced)
            self._catch_up(None)
            if len(self._reduced) > before:
                end_backward(self._parts[0].module)
        self._phase = ""

    def gradients_complete(self) -> None:
        """All gradients of this rank's backward have come; what is left of it is to reduce them."""
        if self._phase == "backward":
            self._running.clear()

    @contextmanager
    def in_step(self) -> Generator[None]:
        """Inside, all ranks run the same collectives by themselves, outside of any pass."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def run(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """Call a collective, after those that come before it."""
        if self._in_step:
            return call()
        sequence, place = self._sequence.collectives, self._place
        if place >= len(sequence) or sequence[place] != collective:
            self._catch_up(collective)
        self._place += 1
        if collective.reduces:
            self._running.discard(collective.part)
            self._reduced.add(collective.part)
        else:
            self._goes_forward(collective.part)
        return call()

    def _goes_forward(self, part: int) -> None:
        if self._phase == "forward" and self._comes_back and not self._standing_in:
            self._running.add(part)

    def _enter(self, phase: str, key: str) -> None:
        self._phase, self._place = phase, 0
        self._sequence = sequence = self._sequences.setdefault((phase, key), _Sequence())
        if sequence.open and (phase, key) not in self._begun:
            sequence.collectives, sequence.alike, sequence.ended = [], True, False
        self._begun.add((phase, key))

    def _catch_up(self, collective: Collective | None) -> None:
        """Take part in the collectives before `collective`, or in all that are left: of parts left out here."""
        sequence = self._sequence
        while True:
            if self._place == len(sequence.collectives) and (sequence.ended or not self._agree(collective)):
                if collective is None:
                    return
                raise self._out_of_order(collective)
            following = sequence.collectives[self._place]
            if following == collective:
                return
            if collective is not None and sequence.ended and collective not in sequence.collectives[self._place :]:
                raise self._out_of_order(collective)
            self._stand_in(following, collective)

    def _stand_in(self, following: Collective, collective: Collective | None) -> None:
        """Take part in a collective of a part that this rank does not run, or does not need now."""
        if following.reduces and following.part in self._running:
            raise self._out_of_order(collective)
        place, record = self._place, self._parts[following.part].record
        self._standing_in = True
        try:
            (reduce_now if following.reduces else gather_now)(record)
        finally:
            self._standing_in = False
        if self._place == place:  # as a frozen part that others train
            raise self._out_of_order(following)

    def _agree(self, collective: Collective | None) -> bool:
        """Add the next collective of all ranks to the sequence; False at its end, where all have come.

        Raises:
            TaskError: they come to collectives that can't be brought into one order.
        """
        everybody = self._coming_of_all(collective)
        wanted = {coming.collective for coming in everybody if coming.collective is not None}
        sequence = self._sequence
        if not wanted:
            sequence.ended = True
            sequence.open = not (sequence.alike and self._is_fixed(sequence, everybody))
            return False
        sequence.alike = sequence.alike and all(coming.collective == everybody[0].collective for coming in everybody)
        possible = [one for one in wanted if not one.reduces or _all_can_reduce(one.part, everybody)]
        if not possible:
            told = ", ".join(
                f"rank {rank} with {self._named(coming.collective.part)}"
                for rank, coming in enumerate(everybody)
                if coming.collective
            )
            raise TaskError(
                f"the ranks go on with gradients of different parts of the model: {told}. With `fsdp` what all of them "
                f"have called must get its gradients in one order: let the loss use it on each rank, if only times 0, "
                f"reduce as `ordered`, or use `ddp` or `zero1`, whose ranks need not run alike."
            )
        sequence.collectives.append(min(possible, key=_forwards if self._phase == "forward" else _backwards))
        return True

    def _coming_of_all(self, collective: Collective | None) -> list[Coming]:
        """What all ranks come to next, by rank."""
        width = 1 + len(self._parts)
        here = [0.0] * (width * self.group.ranks)
        begin = width * self.group.rank
        here[begin] = 0.0 if collective is None else float(1 + 2 * collective.part + collective.reduces)
        for part in self._running:
            here[begin + 1 + part] = 1.0
        told = self.group.sum_floats(here)  # one message, where gathering values takes two
        rows = [told[place : place + width] for place in range(0, len(told), width)]
        return [
            Coming(
                Collective(int(code - 1) % 2 == 1, int(code - 1) // 2) if code else None,
                frozenset(part for part, runs in enumerate(running) if runs),
            )
            for code, *running in rows
        ]

    def _is_fixed(self, sequence: _Sequence, everybody: list[Coming]) -> bool:
        """Whether no part is left out of passes that may come in a later one."""
        if self._phase == "backward":
            return self._expected and self._comes_to_all(sequence)
        if self._alone:
            return not self._comes_back or all(len(coming.running) == len(self._parts) for coming in everybody)
        return len({collective.part for collective in sequence.collectives}) == len(self._parts)

    def _comes_to_all(self, sequence: _Sequence) -> bool:
        """Whether a backward has come to all that is trained; what a loss leaves out, another one may need."""
        if not self._comes_back or self._alone:  # then there is none, or nothing is gathered in it
            return True
        come = {one.part for one in sequence.collectives if not one.reduces}  # reduced is also what nobody needed
        trained = (any(one.sharded_param.requires_grad for one in part.record.fsdp_params) for part in self._parts)
        return all(number in come or not is_one for number, is_one in enumerate(trained))

    def _out_of_order(self, collective: Collective | None) -> TaskError:
        assert collective is not None
        rest = self._sequence.collectives[self._place :]
        expected = self._named(rest[0].part) if rest else "nothing more"
        return TaskError(
            f"rank {self.group.rank}{self.group.where()} comes to {self._named(collective.part)} in its "
            f"{self._phase or 'call'}, where the first such pass came to {expected}. {_ADVICE}"
        )

    def _named(self, number: int) -> str:
        name = self._parts[number].name
        return f"'{name}'" if name else "what is in no list"


_ADVICE = (
    "With `fsdp` all ranks gather the items of the model's lists in one order, that of the first pass: items may be "
    "left out, but not come in another order, or more often. Let the model call them so, or use `ddp` or `zero1`, "
    "whose ranks need not run alike."
)


def _all_can_reduce(part: int, everybody: Sequence[Coming]) -> bool:
    """Whether each rank has all its gradients of the part, or none and none to come."""
    collective = Collective(True, part)
    return all(coming.collective == collective or part not in coming.running for coming in everybody)


def _forwards(collective: Collective) -> tuple[int, int]:
    return collective.part, 0


def _backwards(collective: Collective) -> tuple[int, int]:
    """The part that comes first; what is in no list is gathered first and reduced last."""
    if collective.part == 0:
        return (1, 0) if collective.reduces else (-(2**30), 0)
    return -collective.part, int(collective.reduces)


@final
class _InOrder:
    """FSDP2's way to gather a part, or to reduce and scatter its gradients, in its place among all collectives.

    Args:
        sums_whole: whether it is to reduce gradients of which every rank holds all.
    """

    def __init__(self, order: CollectiveOrder, inner: Any, collective: Collective, *, sums_whole: bool = False) -> None:
        self._order, self._inner, self._collective = order, inner, collective
        self._sums_whole, self._allocated = sums_whole, 0

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        # Where every rank holds all, nothing is scattered: FSDP2 asks for two buffers and sums over ranks by itself.
        if self._sums_whole:
            self._allocated += 1
            if self._allocated % 2:
                self._order.run(self._collective, lambda: None)
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._order.run(self._collective, partial(self._inner, *args, **kwargs))
