"""Keep the checkpoints of the best values of a metric, and a file `best` in the run folder that names the best of all.

Of a metric of an evaluation, each new one among the best asks for a checkpoint; of a metric of training, the value at
the very update of each checkpoint that is saved anyway counts. The values are part of the checkpoint, so a resumed run
does not take a worse model for a better one. A value that is not finite is never among them. It does not load the best
back.
"""

from pathlib import Path
from typing import Any, cast, final

from evenstep.errors import ArgumentError, HookError
from evenstep.events.event import EpochBegin, EvaluateEnd, SaveBegin, SaveEnd, TrainBegin
from evenstep.events.files import replace_text
from evenstep.events.hook import Hook
from evenstep.events.hooks.target import MetricTarget, Mode


@final
class Best(Hook):
    """Saves a checkpoint after evaluations with the best values of `metric`, and keeps these from being deleted.

    Args:
        metric: an evaluation and its metric, or `train/` and a metric of training.
        mode: whether lower ("min") or higher ("max") is better.
        min_delta: how much better a value must be than the best so far, more than this, to be the best.
        keep: how many of the best to keep.
        link: the file in the run folder that names the best checkpoint; two hooks `Best` need two names.

    Raises:
        ArgumentError: for an argument that cannot be.

    >>> Best(metric="valid/accuracy", mode="max", keep=3).best_value is None
    True
    """

    def __init__(
        self,
        metric: str = "valid/loss",
        mode: Mode = "min",
        min_delta: float = 0.0,
        *,
        keep: int = 1,
        link: str = "best",
    ) -> None:
        if not isinstance(cast("object", link), str) or Path(link).name != link or link in ("", ".."):
            raise ArgumentError(f"`link` must be the name of a file in the run folder, but is {link!r}; write 'best'.")
        self._target = MetricTarget(metric=metric, mode=mode, min_delta=min_delta)
        self._keep = keep
        self.link = link
        self._best: list[tuple[float, int]] = []  # value and update, the best first
        # the same as of the last checkpoint, and as of the one under way
        self._saved = self._saving = list[tuple[float, int]]()

    @property
    def best_value(self) -> float | None:
        """The best value so far, or None."""
        return self._best[0][0] if self._best else None

    @property
    def best_update(self) -> int | None:
        """The update of the best value so far, or None."""
        return self._best[0][1] if self._best else None

    def before_train(self, event: TrainBegin) -> None:
        if not self._target.is_of_training(self):
            self._target.check(self)
        self._link()

    def before_epoch(self, event: EpochBegin) -> None:
        self._link()

    def after_evaluate(self, event: EvaluateEnd) -> None:
        if self._target.is_of_training(self):
            return
        value = self._target.value(self, event)
        if value is not None and self._take(value, event.update):
            self.trainer.request_save()

    def before_save(self, event: SaveBegin) -> None:
        if self._target.is_of_training(self):
            if event.update:
                self._target.check_training(self)
            latest = self.trainer.storage.latest(self._target.metric)
            if latest is not None and latest.update == event.update:
                self._take(latest.value, event.update)
        self._saving = self._best.copy()

    def after_save(self, event: SaveEnd) -> None:
        if event.path is None:  # so it is none of the best, and what it has displaced is still there
            later = [one for one in self._best if one not in self._saving]
            self._best = self._saved.copy()
            for value, update in later:
                self._take(value, update)
            return
        self._saved = self._saving
        if event.update == self.best_update and self.trainer.is_first_rank:
            replace_text(self._folder() / self.link, f"{event.path.name}\n")

    def kept_checkpoints(self) -> tuple[str, ...]:
        return tuple(f"step-{update:08d}" for _, update in self._best)

    def state_dict(self) -> dict[str, Any]:
        return {**self._target.state_dict(), "best": [list(one) for one in self._best]}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        said = self._target.differs(state)
        self._best = [] if said else [(value, update) for value, update in state["best"]][: self._keep]
        self._saved = self._best.copy()
        return said or None

    def _take(self, value: float, update: int) -> bool:
        if any(known == update for _, known in self._best):
            return False
        is_best = self._target.better(value, than=self.best_value)
        place = 0 if is_best else len(self._best)
        while place > 1 and self._target.beats(value, self._best[place - 1][0]):
            place -= 1
        if not self._target.beats(value, None) or place >= self._keep:
            return False
        self._best.insert(place, (value, update))
        del self._best[self._keep :]
        return True

    def _link(self) -> None:
        folder = self._folder()
        link, step = folder / self.link, next(iter(self.kept_checkpoints()), "")
        if not self.trainer.is_first_rank:
            return
        named = link.read_text().strip() if link.is_file() else ""
        if step != named and step and (folder / "checkpoints" / step).is_dir():
            replace_text(link, f"{step}\n")
        elif step != named and named and not (folder / "checkpoints" / named).is_dir():
            link.unlink()

    def _folder(self) -> Path:
        if self.trainer.folder is None:
            raise HookError(
                f"hook `{self.name}` saves checkpoints, but the trainer has no `folder`; give it one.", field=self.name
            )
        return self.trainer.folder
