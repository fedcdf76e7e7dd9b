"""What FSDP2 says to the other ranks in a pass, its words: gathers and reductions of parts, in one order on all ranks.

A collective does not carry what it is about: where one rank gathers a part and another the next one, equal sizes give
wrong numbers in silence, and others end the process. So the words of a pass follow a *script*. In the first pass of a
kind, the ranks tell each other before each word which one they come to, and agree on the next: who does not come to
it says it as well, with nothing to gain from it. If all ranks have run all parts alike, later passes follow the same
script: before a rank says a word it says those that come before it, whose parts it leaves out, and it never says one
that the script has no longer or not at all, but raises. That costs one comparison per word. If they have not, because
items of lists are chosen by the batch or at random, they agree on each word of each pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evenstep.errors import TaskError
from evenstep.internals import collectives, end_backward, gather_now, reduce_now
from evenstep.parallel.group import Group


class Collective(NamedTuple):
    """A collective of one part, by its number."""

    reduces: bool
    part: int


class Wish(NamedTuple):
    """What a rank comes to next.

    Args:
        word: None at the end of a phase.
        running: parts that have gone forward here, and whose gradients are still to come.
    """

    word: Collective | None
    running: frozenset[int]


@final
@dataclass(slots=True)
class _Script:
    """The words of passes of one kind, in one phase.

    Args:
        words: of all such passes; of this one only while it is open.
        open: whether ranks still agree on each word.
        alike: whether all of them have come to each of the words at once.
        ended: whether all of them have come to the end.
    """

    words: list[Collective] = field(default_factory=list[Collective])
    open: bool = True
    alike: bool = True
    ended: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    name: str
    module: Any
    record: Any


@final
class Spoken:
    """The words of one rank.

    Args:
        group: all ranks that run passes together.

    Attributes:
        armed: whether gradients are reduced in the backward that comes.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.armed = False
        self._parts: list[_Part] = []
        self._alone = False
        self._scripts: dict[tuple[str, str], _Script] = {}
        self._kind = ""
        self._phase = ""  # "forward", "backward", or between passes
        self._comes_back = False
        self._script = _Script(open=False, ended=True)
        self._place = 0  # in the script
        self._foreseen = False  # the forward of this pass, by that of the first
        self._standing_in = False
        self._begun: set[tuple[str, str]] = set()  # scripts, in this pass
        self._running: set[int] = set()
        self._reduced: set[int] = set()  # parts whose gradients are reduced in this pass

    def listen(self, part: Any, record: Any, name: str = "", *, alone: bool = False) -> None:
        """Take part in what `part` says.

        Args:
            part: an `FSDPModule`; the outermost one first.
            record: FSDP2's of its parameters.
            name: of the part in the model.
            alone: whether each rank holds all of it.
        """
        number, self._alone = len(self._parts), alone
        gather, reduce = collectives(record)
        part.set_custom_all_gather(_Gather(self, gather, number))
        part.set_custom_reduce_scatter(_Reduce(self, reduce, number, alone))
        self._parts.append(_Part(name=name, module=part, record=record))

    def start(self, kind: str = "") -> None:
        """No pass of this kind has begun yet; what an earlier one had still to say is not said."""
        self._phase = ""
        self._kind = kind
        self._reduced.clear()

    def forget(self) -> None:
        """Other parameters are trained from now on, so passes go otherwise: all ranks learn their words anew."""
        self._scripts.clear()
        self._script = _Script(open=False, ended=True)

    def begin(self) -> None:
        """A pass begins, with its forward."""
        self.finish()
        self._begun.clear()
        self._reduced.clear()
        self._running.clear()
        self._comes_back = torch.is_grad_enabled()
        self._turn_to("forward", f"{self._kind}/{self._comes_back}")

    def turn(self) -> None:
        """The forward of the pass has ended."""
        self._say_what_is_before(None)
        self._foreseen = not self._script.open
        self._turn_back()

    def arm(self, *, armed: bool) -> None:
        """Gradients are reduced in the backward that comes, or not."""
        self.armed = armed
        if self._phase == "backward" and not self._place:
            self._turn_back()

    def _turn_back(self) -> None:
        self._turn_to("backward", f"{self._kind}/{self._comes_back}/{self.armed}")

    def finish(self) -> None:
        """Say what is left of the last pass: this rank's backward is through. All ranks come here between passes."""
        if self._phase == "backward":
            self._running.clear()
            before = len(self._reduced)
            self._say_what_is_before(None)
            if len(self._reduced) > before:
                end_backward(self._parts[0].module)
        self._phase = ""

    def through(self) -> None:
        """All gradients of this rank's backward have come; what is left of it is to reduce them."""
        if self._phase == "backward":
            self._running.clear()

    def say(self, word: Collective, collective: Callable[[], Any]) -> Any:
        """Do `collective`, after what comes before it."""
        script, place = self._script.words, self._place
        if place < len(script) and script[place] == word:
            pass
        else:
            self._say_what_is_before(word)
        self._place += 1
        if word.reduces:
            self._running.discard(word.part)
            self._reduced.add(word.part)
        elif self._phase == "forward" and self._comes_back and not self._standing_in:
            self._running.add(word.part)
        return collective()

    def _turn_to(self, phase: str, key: str) -> None:
        self._phase, self._place = phase, 0
        self._script = script = self._scripts.setdefault((phase, key), _Script())
        if script.open and (phase, key) not in self._begun:
            script.words, script.alike, script.ended = [], True, False
        self._begun.add((phase, key))

    def _say_what_is_before(self, word: Collective | None) -> None:
        """Say the script's words up to `word`, or to its end, in place of parts that this rank does not run."""
        script = self._script
        while True:
            if self._place == len(script.words) and (script.ended or not self._agree(word)):
                if word is None:
                    return
                raise self._unforeseen(word)
            following = script.words[self._place]
            if following == word:
                return
            if word is not None and script.ended and word not in script.words[self._place :]:
                raise self._unforeseen(word)
            self._stand_in(following, word)

    def _stand_in(self, following: Collective, word: Collective | None) -> None:
        """Say a word of a part that this rank does not run, or does not need now."""
        if following.reduces and following.part in self._running:
            raise self._unforeseen(word)
        place, record = self._place, self._parts[following.part].record
        self._standing_in = True
        try:
            (reduce_now if following.reduces else gather_now)(record)
        finally:
            self._standing_in = False
        if self._place == place:  # as a frozen part that others train
            raise self._unforeseen(following)

    def _agree(self, word: Collective | None) -> bool:
        """Add the next word of all ranks to the script; False at its end, where all have come.

        Raises:
            TaskError: they come to words that can't be brought into one order.
        """
        wishes = self._wishes(word)
        wanted = {wish.word for wish in wishes if wish.word is not None}
        script = self._script
        if not wanted:
            script.ended = True
            script.open = not (script.alike and self._all_come(script))
            return False
        script.alike = script.alike and all(wish.word == wishes[0].word for wish in wishes)
        possible = [one for one in wanted if not one.reduces or _all_can_reduce(one.part, wishes)]
        if not possible:
            said = ", ".join(
                f"rank {rank} with {self._named(wish.word.part)}" for rank, wish in enumerate(wishes) if wish.word
            )
            raise TaskError(f"the ranks go on with gradients of different parts of the model: {said}. {_ADVICE}")
        script.words.append(min(possible, key=_forwards if self._phase == "forward" else _backwards))
        return True

    def _wishes(self, word: Collective | None) -> list[Wish]:
        """What all ranks come to next, by rank."""
        width = 1 + len(self._parts)
        here = [0.0] * (width * self.group.ranks)
        begin = width * self.group.rank
        here[begin] = 0.0 if word is None else float(1 + 2 * word.part + word.reduces)
        for part in self._running:
            here[begin + 1 + part] = 1.0
        said = self.group.sum_floats(here)  # one message, where gathering values takes two
        rows = [said[place : place + width] for place in range(0, len(said), width)]
        return [
            Wish(
                Collective(int(code - 1) % 2 == 1, int(code - 1) // 2) if code else None,
                frozenset(part for part, runs in enumerate(running) if runs),
            )
            for code, *running in rows
        ]

    def _all_come(self, script: _Script) -> bool:
        """Whether no part is left out of passes that may come in a later one."""
        if self._phase == "backward":
            return self._foreseen
        return self._alone or len({word.part for word in script.words}) == len(self._parts)

    def _unforeseen(self, word: Collective | None) -> TaskError:
        assert word is not None
        rest = self._script.words[self._place :]
        foreseen = self._named(rest[0].part) if rest else "nothing more"
        return TaskError(
            f"rank {self.group.rank}{self.group.where()} comes to {self._named(word.part)} in its "
            f"{self._phase or 'call'}, where the first such pass came to {foreseen}. {_ADVICE}"
        )

    def _named(self, number: int) -> str:
        name = self._parts[number].name
        return f"'{name}'" if name else "what is in no list"


_ADVICE = (
    "With `fsdp` all ranks gather the items of the model's lists in one order, that of the first pass: items may be "
    "left out, but not come in another order, or more often. Let the model call them so, or use `ddp` or `zero1`, "
    "whose ranks need not run alike."
)


def _all_can_reduce(part: int, wishes: Sequence[Wish]) -> bool:
    """Whether each rank has all its gradients of the part, or none and none to come."""
    word = Collective(True, part)
    return all(wish.word == word or part not in wish.running for wish in wishes)


def _forwards(word: Collective) -> tuple[int, int]:
    return word.part, 0


def _backwards(word: Collective) -> tuple[int, int]:
    """The part that comes first; what is in no list is gathered first and reduced last."""
    if word.part == 0:
        return (1, 0) if word.reduces else (-(2**30), 0)
    return -word.part, int(word.reduces)


@final
class _Gather:
    """FSDP2's way to gather a part, in its place among all words."""

    def __init__(self, spoken: Spoken, inner: Any, number: int) -> None:
        self._spoken, self._inner, self._word = spoken, inner, Collective(False, number)
        self.allocate = inner.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._spoken.say(
            self._word,
            lambda: self._inner(output_tensor, input_tensor, *args, **kwargs),
        )


@final
class _Reduce:
    """FSDP2's way to reduce and scatter a part's gradients, in its place among all words."""

    def __init__(self, spoken: Spoken, inner: Any, number: int, alone: bool) -> None:
        self._spoken, self._inner, self._word = spoken, inner, Collective(True, number)
        self._alone, self._allocated = alone, 0

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        # Where every rank holds all, nothing is scattered: FSDP2 asks for two buffers and sums over ranks by itself.
        if self._alone:
            self._allocated += 1
            if self._allocated % 2:
                self._spoken.say(self._word, nothing)
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._spoken.say(
            self._word,
            lambda: self._inner(output_tensor, input_tensor, *args, **kwargs),
        )


def nothing() -> None:
    """Do nothing."""
