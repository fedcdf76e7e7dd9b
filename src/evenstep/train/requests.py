"""Requests of hooks, signals and users, which the loop executes at the end of an update.

A request only notes what is wanted, so it may come from anywhere, a signal handler too. The loop acts when no update is
half done, on what all ranks have agreed on.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from evenstep.data import Position
from evenstep.parallel import Group


class End(NamedTuple):
    """Why the loop ends.

    Args:
        reason: in words.
        outcome: "done" when all that was planned is done, "stopped" when something requested it.
        requeue: whether the run wants to be run again, to go on from there.
    """

    reason: str
    outcome: Literal["done", "stopped"] = "done"
    requeue: bool = False


class GoBack(NamedTuple):
    """That the run must go back to a checkpoint.

    Args:
        update: the number of the update that must not have happened.
        past: the end of the data to be given up; None: the data are taken again.
        fault: what went wrong in it, as a sentence.
    """

    update: int
    past: Position | None
    fault: str


class Agreed(NamedTuple):
    """Requests of any rank, which all ranks act on."""

    stop: End | None
    save: bool
    evaluate: bool


_NOTHING = Agreed(stop=None, save=False, evaluate=False)


@final
@dataclass(slots=True)
class Requests:
    """Open requests of this rank.

    Args:
        stop: the reason to stop, or "".
        requeue: whether a run that stops wants to be run again.
        go_back: that the run must go back to a checkpoint, as was found between two updates.
    """

    stop: str = ""
    save: bool = False
    evaluate: bool = False
    requeue: bool = False
    go_back: GoBack | None = None

    def request_stop(self, reason: str, *, requeue: bool = False) -> None:
        """Note that the run is to stop at the end of this update; the last reason counts, but those for good first.

        A run that is done is not run again, though a signal or a time limit has come meanwhile.
        """
        if not (requeue and self.is_for_good):
            self.stop, self.requeue = reason or "asked to stop", requeue

    @property
    def is_for_good(self) -> bool:
        return bool(self.stop) and not self.requeue

    def agree(self, group: Group) -> Agreed:
        if group.ranks == 1 and not (self.stop or self.save or self.evaluate):
            return _NOTHING
        done, save, evaluate, requeue, reason = self.is_for_good, self.save, self.evaluate, self.requeue, self.stop
        if group.ranks > 1:
            sums = group.sum_floats([done, save, evaluate, requeue])
            done, save, evaluate, requeue = (total > 0 for total in sums)
            if done or requeue:
                reasons = [one for one, again in group.gather((reason, self.requeue)) if one and again is not done]
                reason = reasons[0]
        end = End(reason, outcome="stopped", requeue=not done) if done or requeue else None
        return Agreed(stop=end, save=save, evaluate=evaluate)

    @contextmanager
    def granting(self, wish: Literal["save", "evaluate"]) -> Generator[None]:
        """Clear a request around its execution; it is open again if the execution raises.

        Who asks for it meanwhile has it at this update.
        """
        setattr(self, wish, False)
        try:
            yield
        except BaseException:
            setattr(self, wish, True)
            raise
        setattr(self, wish, False)

    def forget_stop(self) -> None:
        """The run has ended."""
        self.stop, self.requeue = "", False

    def forget_actions(self) -> None:
        """The updates at which saves and evaluations were wanted did not happen; they will be requested again."""
        self.save = self.evaluate = False
