"""Hook that times the actions of one update on each rank, as a Chrome trace for Perfetto."""

import json
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

if TYPE_CHECKING:
    from evenstep.train import Trainer

FOLDER = "timeline"


@final
class Timeline(Hook):
    """Time every action of one update, on each rank, into `timeline/rank-N.json` of the run folder.

    Args:
        update: number of the update; one after the first few, which also allocate and compile.
    """

    failure_policy = "continue"  # it only looks

    def __init__(self, *, update: int = 10) -> None:
        self._update = update
        self._began = 0.0
        self._clock = 0.0
        self._events: list[dict[str, Any]] = []
        self._seen: set[Action] = set()
        self._kept: dict[int, Mapping[Op, Callable[..., None]]] = {}

    def before_train(self, event: TrainBegin) -> None:
        if self.trainer.folder is None:
            raise HookError(
                f"hook `{self.name}` writes files, but the trainer has no `folder`; give it one.", field=self.name
            )

    def before_update(self, event: UpdateBegin) -> None:
        if event.update != self._update:
            return
        self._begin()
        for number, stage in self._run.stages.items():
            self._kept[number] = stage.acts
            stage.acts = {op: partial(self._time, act) for op, act in stage.acts.items()}

    def after_update(self, event: UpdateEnd) -> None:
        for number, acts in self._kept.items():
            self._run.stages[number].acts = acts
        if self._kept and event.committed:
            self._write()
        self._kept = {}

    @property
    def _run(self) -> "Trainer":
        return cast("Trainer", self.trainer)

    def _begin(self) -> None:
        self._seen = set()
        self._events = []
        self._began = time()
        self._clock = perf_counter()

    def _time(self, act: Callable[..., None], action: Action, step: Any) -> None:
        if action.op is Op.FORWARD and action in self._seen:
            self._begin()  # the update is tried once more
        self._seen.add(action)
        waited = self._run.group.waited_s
        start = perf_counter()
        act(action, step)
        if self._run.device.type != "cpu":
            torch.accelerator.synchronize(self._run.device)
        end = perf_counter()
        self._events.append(
            {
                "name": str(action),
                "cat": action.op.name,
                "ph": "X",
                "ts": 1e6 * (self._began + start - self._clock),
                "dur": 1e6 * (end - start),
                "args": {"waited_ms": 1e3 * min(self._run.group.waited_s - waited, end - start)},
            }
        )

    def _write(self) -> None:
        run = self._run
        mesh = run.model.mesh if isinstance(run.model, PipelineModel) else None
        place = {"pid": 0 if mesh is None else mesh.data.rank, "tid": run.group.rank}  # a process for each pipeline
        name = {"name": "thread_name", "ph": "M", **place, "args": {"name": f"rank {run.group.rank}"}}
        trace = {"traceEvents": [name, *({**event, **place} for event in self._events)], "displayTimeUnit": "ms"}
        folder = cast("Path", run.folder)
        replace_text(folder / FOLDER / f"rank-{run.group.rank:05d}.json", json.dumps(trace) + "\n")
