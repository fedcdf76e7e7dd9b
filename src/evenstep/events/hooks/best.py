"""Keeps the checkpoints with the best values of a metric, and a file `best` that names the best one."""

import math
from typing import Any, final

from evenstep.events.event import EpochEvent, EvaluateEvent, SaveEvent, TrainEvent
from evenstep.events.files import replace_text
from evenstep.events.hook import Hook, run_folder
from evenstep.events.hooks.target import MetricTarget, Mode
from evenstep.schema import Count


@final
class Best(Hook):
    """Keeps the checkpoints with the best values of `metric` from being deleted.

    Each value among the best requests a checkpoint; values that are not finite never count.

    Args:
        metric: an evaluation and its metric.
        mode: "min" if lower is better, "max" if higher is better.
        min_delta: least improvement on the best value so far; it must be larger.
        keep: number of checkpoints to keep.
        link: name of the file in the run folder that names the best checkpoint.

    >>> Best(metric="valid/accuracy", mode="max", keep=3).best_value is None
    True
    """

    draws = False

    def __init__(
        self,
        metric: str = "valid/loss",
        mode: Mode = "min",
        min_delta: float = 0.0,
        *,
        keep: Count = 1,
        link: str = "best",
    ) -> None:
        self._target = MetricTarget(metric=metric, mode=mode, min_delta=min_delta)
        self._keep = keep
        self.link = link
        self._best: list[tuple[float, int]] = []
        """Values and updates, the best first."""
        self._saved: list[tuple[float, int]] = []
        """`_best` as of the last complete checkpoint."""
        self._saving: list[tuple[float, int]] = []
        """`_best` as of the checkpoint that is being written."""

    @property
    def best_value(self) -> float | None:
        """Best value so far, or None."""
        return self._best[0][0] if self._best else None

    def before_train(self, event: TrainEvent) -> None:
        self._target.check(self)
        self._correct_link()

    def before_epoch(self, event: EpochEvent) -> None:
        self._correct_link()

    def after_evaluate(self, event: EvaluateEvent) -> None:
        value = self._target.value(self, event)
        if value is not None and self._take(value, event.update):
            self.trainer.request_save()

    def before_save(self, event: SaveEvent) -> None:
        self._saving = self._best.copy()

    def after_save(self, event: SaveEvent) -> None:
        if event.path is None:  # the checkpoints that it would have displaced are still there
            later = [one for one in self._best if one not in self._saving]
            self._best = self._saved.copy()
            for value, update in later:
                self._take(value, update)
            return
        self._saved = self._saving
        self._correct_link()

    def kept_checkpoints(self) -> tuple[str, ...]:
        return tuple(f"step-{update:08d}" for _, update in self._best)

    def state_dict(self) -> dict[str, Any]:
        return {**self._target.state_dict(), "best": [list(one) for one in self._best]}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        changed = self._target.differs(state)
        self._best = [] if changed else [(value, update) for value, update in state["best"]][: self._keep]
        self._saved = self._best.copy()
        return changed or None

    def _take(self, value: float, update: int) -> bool:
        if not math.isfinite(value) or any(known == update for _, known in self._best):
            return False
        place = 0
        if not self._target.better(value, than=self.best_value):
            place = 1 + sum(self._target.gain(value, known) <= 0 for known, _ in self._best[1:])
        self._best.insert(place, (value, update))
        del self._best[self._keep :]
        return place < self._keep

    def _correct_link(self) -> None:
        folder = run_folder(self)
        if self.trainer.rank:
            return
        link = folder / self.link
        linked = link.read_text().strip() if link.is_file() else ""
        best = next(iter(self.kept_checkpoints()), "")
        if best and best != linked and (folder / "checkpoints" / best).is_dir():
            replace_text(link, f"{best}\n")
        elif linked and best != linked and not (folder / "checkpoints" / linked).is_dir():
            link.unlink()
