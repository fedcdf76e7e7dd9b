"""What hooks, signals and users have asked for, until the loop does it at the end of an update.

Asking only notes the wish, so it may come from anywhere, a signal handler too. The loop acts when no update is half
done.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from evenstep.errors import LostRankError
from evenstep.parallel import Group


@final
@dataclass(slots=True)
class Asks:
    """Open wishes.

    Args:
        stop: the reason to stop, or "".
        save: whether a checkpoint is wanted.
        evaluate: whether an evaluation is wanted.
        requeue: whether a run that stops wants to be run again.
    """

    stop: str = ""
    save: bool = False
    evaluate: bool = False
    requeue: bool = False

    def agree(self, group: Group) -> None:
        """Make the wish of any rank the wish of all: whoever acts, acts together."""
        if group.ranks == 1:
            return
        stop, save, evaluate, requeue = group.sum_floats([bool(self.stop), self.save, self.evaluate, self.requeue])
        self.save, self.evaluate, self.requeue = save > 0, evaluate > 0, requeue > 0
        if stop:
            self.stop = next(reason for reason in group.gather(self.stop) if reason)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """An evaluation is no longer wanted, unless it breaks off because ranks have been lost or have come."""
        self.evaluate = False
        try:
            yield
        except LostRankError:
            self.evaluate = True
            raise

    @contextmanager
    def saving(self) -> Generator[None]:
        """The same for a checkpoint."""
        self.save = False
        try:
            yield
        except LostRankError:
            self.save = True
            raise

    def take_save(self) -> bool:
        """Whether a checkpoint was wanted; it no longer is."""
        wanted, self.save = self.save, False
        return wanted

    def forget_actions(self) -> None:
        """The updates at which saves and evaluations were wanted did not happen; they will be asked for again."""
        self.save = self.evaluate = False
