"""Hook that times the actions of one update on each rank, as a Chrome trace for Perfetto."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, cast, final

import torch

from evenstep.errors import HookError
from evenstep.events import Hook, TrainBegin, UpdateBegin, UpdateEnd
from evenstep.events.files import replace_text
from evenstep.pipeline import Op, PipelineModel
from evenstep.pipeline.action import Action
from evenstep.tools.planning.draw import trace_event, trace_text

if TYPE_CHECKING:
    from evenstep.train import Trainer


@final
class Timeline(Hook):
    """Time every action of one update, on each rank, into `timeline/rank-N.json` of the run folder.

    Args:
        update: number of the update; the first few also allocate and compile.
    """

    failure_policy = "continue"
    may_evaluate = False

    def __init__(self, *, update: int = 10) -> None:
        self._update = update
        self._epoch_s = 0.0  # what `perf_counter` must be added to, so that ranks of several hosts share a clock
        self._events: dict[Action, dict[str, Any]] = {}  # of the last try of the update
        self._kept: dict[int, Mapping[Op, Callable[..., None]]] = {}

    def before_train(self, event: TrainBegin) -> None:
        if self.trainer.folder is None:
            raise HookError(
                f"hook `{self.name}` writes files, but the trainer has no `folder`; give it one.", field=self.name
            )

    def before_update(self, event: UpdateBegin) -> None:
        if event.update != self._update:
            return
        self._epoch_s = time() - perf_counter()
        for number, stage in self._run.stages.items():
            self._kept[number] = stage.acts
            stage.acts = {op: partial(self._time, act) for op, act in stage.acts.items()}

    def after_update(self, event: UpdateEnd) -> None:
        for number, acts in self._kept.items():
            self._run.stages[number].acts = acts
        if self._kept and event.committed:
            file = cast("Path", self._run.folder) / "timeline" / f"rank-{self._run.group.rank:05d}.json"
            replace_text(file, trace_text(self._events.values()))
        self._kept = {}
        self._events = {}

    @property
    def _run(self) -> "Trainer":
        return cast("Trainer", self.trainer)

    def _time(self, act: Callable[..., None], action: Action, step: Any) -> None:
        run = self._run
        if action in self._events:
            self._events = {}  # the update is tried again
        waited = run.group.waited_s
        start = perf_counter()
        act(action, step)
        if run.device.type != "cpu":
            torch.accelerator.synchronize(run.device)
        seconds = perf_counter() - start
        self._events[action] = trace_event(
            action,
            start_s=self._epoch_s + start,
            duration_s=seconds,
            rank=run.group.rank,
            pipeline=run.model.mesh.data.rank if isinstance(run.model, PipelineModel) else 0,
            waited_ms=1e3 * min(run.group.waited_s - waited, seconds),
        )
