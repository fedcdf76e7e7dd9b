"""Keep the checkpoint of the best evaluation, and a file `best` in the run folder that names it.

The best value is part of the checkpoint, so a resumed run does not take a worse model for the best. A value that is
not finite is never the best. It does not load the best back.
"""

from pathlib import Path
from typing import Any, final

from evenstep.errors import HookError
from evenstep.events.event import EvaluateEnd, SaveEnd, TrainBegin
from evenstep.events.files import replace_text
from evenstep.events.hook import Hook
from evenstep.events.hooks.target import Mode, Target


@final
class Best(Hook):
    """Ask for a checkpoint whenever `metric` is better than ever, and keep the best one from being deleted.

    Args:
        metric: an evaluation and its metric.
        mode: whether lower ("min") or higher ("max") is better.
        min_delta: how much better it must be, more than this, in units of the metric.
        link: the file in the run folder that names the best checkpoint; two hooks `Best` need two names.

    Raises:
        ArgumentError: for an argument that cannot be.

    >>> Best(metric="valid/accuracy", mode="max").best_value is None
    True
    """

    def __init__(
        self, metric: str = "valid/loss", mode: Mode = "min", min_delta: float = 0.0, *, link: str = "best"
    ) -> None:
        self._target = Target(metric=metric, mode=mode, min_delta=min_delta)
        self._link = link
        self.best_value: float | None = None
        self.best_update: int | None = None

    def before_train(self, event: TrainBegin) -> None:
        self._target.check(self)
        folder = self._folder()
        for step in self.kept_checkpoints():  # a run killed between the save and the link has only the former
            if self.trainer.is_first_rank and (folder / "checkpoints" / step).is_dir():
                replace_text(folder / self._link, f"{step}\n")

    def after_evaluate(self, event: EvaluateEnd) -> None:
        value = self._target.value(self, event)
        if value is not None and self._target.better(value, than=self.best_value):
            self.best_value, self.best_update = value, event.update
            self.trainer.ask_save()

    def after_save(self, event: SaveEnd) -> None:
        if event.path is not None and event.update == self.best_update and self.trainer.is_first_rank:
            replace_text(self._folder() / self._link, f"{event.path.name}\n")

    def kept_checkpoints(self) -> tuple[str, ...]:
        return () if self.best_update is None else (f"step-{self.best_update:08d}",)

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value, "best_update": self.best_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_value, self.best_update = state["best_value"], state["best_update"]

    def _folder(self) -> Path:
        if self.trainer.folder is None:
            raise HookError(f"hook `{self.name}` saves checkpoints, but the trainer has no `folder`; give it one.")
        return self.trainer.folder
