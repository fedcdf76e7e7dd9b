"""When each rank did what in one update: a hook that times the actions of its plan, for the report to draw.

Every action of one update is timed on every rank and written to `timeline/rank-N.json` of the run folder, when the
update was committed. On an accelerator the device is waited for after each action of that update, since a clock of the
host would else tell when work was handed over, not when it was done; all other updates are left as they are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, cast, final

import torch

from evenstep.arguments import require_whole
from evenstep.errors import HookError, PlanError
from evenstep.events import Hook, TrainBegin, UpdateBegin, UpdateEnd
from evenstep.events.files import replace_text
from evenstep.extras.planning.text import read_plans
from evenstep.pipeline import Op, PipelineModel
from evenstep.pipeline.action import Action

if TYPE_CHECKING:
    from evenstep.train import Trainer

FOLDER = "timeline"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action of a plan, when it ran.

    Args:
        start_s: in seconds since the rank began its update, as `end_s` is.
        waited_s: how much of that the rank waited for others.
    """

    action: Action
    start_s: float
    end_s: float
    waited_s: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """What one rank did in one update.

    Args:
        began: when the rank began, in seconds of the epoch.
        pipeline_rank: its place in its pipeline, 0 where there is none.
        data_rank: which of several pipelines, or replicas, it is in.
        rank_of: for each stage its rank in the pipeline.
    """

    update: int
    rank: int
    began: float
    pipeline_rank: int
    data_rank: int
    rank_of: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    actions: tuple[TimedAction, ...]


@final
class Timeline(Hook):
    """Time every action of one update, on each rank, into the run folder; the report shows it beside the plan.

    Args:
        update: which update; one after the first few, which also allocate and compile.

    Raises:
        ArgumentError: for an update below 1.

    >>> Timeline(update=20).name
    'Timeline'
    """

    failure_policy = "continue"  # it only looks

    def __init__(self, *, update: int = 10) -> None:
        require_whole("update", update)
        self._update = update
        self._began, self._clock = 0.0, 0.0
        self._timed: list[TimedAction] = []
        self._seen: set[Action] = set()
        self._kept: dict[int, Mapping[Op, Callable[..., None]]] = {}

    def before_train(self, event: TrainBegin) -> None:
        if self.trainer.folder is None:
            raise HookError(f"hook `{self.name}` writes files, but the trainer has no `folder`; give it one.")

    def before_update(self, event: UpdateBegin) -> None:
        if event.update != self._update:
            return
        self._begin()
        for number, stage in self._run.stages.items():
            self._kept[number] = stage.acts
            stage.acts = {op: partial(self._time, act) for op, act in stage.acts.items()}

    def after_update(self, event: UpdateEnd) -> None:
        if not self._kept:
            return
        for number, acts in self._kept.items():
            self._run.stages[number].acts = acts
        self._kept = {}
        if event.committed and not self._timed:
            raise HookError(
                f"hook `{self.name}` was to time update {event.update}, but no action of a plan was run in it: the "
                f"update is compiled as a whole, or this rank had no work; take another update, or leave the hook out."
            )
        if event.committed:
            self._write(event.update)

    @property
    def _run(self) -> "Trainer":
        return cast("Trainer", self.trainer)

    def _begin(self) -> None:
        self._seen, self._timed = set(), []
        self._began, self._clock = time(), perf_counter()

    def _time(self, act: Callable[..., None], action: Action, step: Any) -> None:
        if action.op is Op.FORWARD and action in self._seen:
            self._begin()  # the update is tried once more
        self._seen.add(action)
        waited, start = self._run.group.waited_s, perf_counter()
        act(action, step)
        if self._run.device.type != "cpu":
            torch.accelerator.synchronize(self._run.device)
        end = perf_counter()
        self._timed.append(
            TimedAction(
                action=action,
                start_s=start - self._clock,
                end_s=end - self._clock,
                waited_s=min(self._run.group.waited_s - waited, end - start),
            )
        )

    def _write(self, update: int) -> None:
        run, folder = self._run, cast("Path", self.trainer.folder)
        content: dict[str, object] = {"update": update, "rank": run.group.rank, "began": self._began}
        if isinstance(run.model, PipelineModel):
            mesh, layout = run.model.mesh, run.model.layout
            content |= {"pipeline_rank": mesh.pipeline.rank, "data_rank": mesh.data.rank}
            content |= {"schedule": run.model.schedule.name, "rank_of": layout.rank_of, "edges": layout.edges}
        else:
            content |= {"pipeline_rank": 0, "data_rank": run.group.rank, "schedule": "", "rank_of": [0], "edges": []}
        content["actions"] = [
            [str(one.action), *(round(seconds, 7) for seconds in (one.start_s, one.end_s, one.waited_s))]
            for one in self._timed
        ]
        replace_text(folder / FOLDER / f"rank-{run.group.rank:05d}.json", json.dumps(content) + "\n")


def read_rank(content: Mapping[str, object]) -> RankTimeline | None:
    """What a file says, or None where it does not say it all.

    >>> content = {"update": 3, "rank": 0, "began": 5.0, "pipeline_rank": 0, "data_rank": 0, "schedule": "",
    ...            "rank_of": [0], "edges": [], "actions": [["0F7", 0.0, 0.5, 0.0]]}
    >>> str(read_rank(content).actions[0].action)
    '0F7'
    """
    match content:
        case {
            "update": int(update),
            "rank": int(rank),
            "began": float(began),
            "pipeline_rank": int(pipeline_rank),
            "data_rank": int(data_rank),
            "rank_of": list(rank_of),
            "edges": list(edges),
            "actions": list(actions),
        } if update >= 0 and rank >= 0 and 0 <= began < 1e12:
            owners = _whole(cast("Sequence[object]", rank_of))
            pairs = [
                _whole(cast("Sequence[object]", one)) for one in cast("list[object]", edges) if isinstance(one, list)
            ]
            timed = [_timed(one) for one in cast("list[object]", actions)]
        case _:
            return None
    known = [one for one in timed if one is not None]
    if len(known) != len(timed) or not owners or any(len(pair) != 2 for pair in pairs):
        return None
    return RankTimeline(
        update=update,
        rank=rank,
        began=began,
        pipeline_rank=pipeline_rank,
        data_rank=data_rank,
        rank_of=owners,
        edges=tuple((pair[0], pair[1]) for pair in pairs),
        actions=tuple(known),
    )


def _whole(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(value for value in values if type(value) is int)


def _timed(entry: object) -> TimedAction | None:
    match entry:
        case [str(text), float() | int() as start, float() | int() as end, float() | int() as waited] if (
            0 <= start <= end < 1e6 and waited >= 0
        ):
            pass
        case _:
            return None
    try:
        ((action,),) = read_plans(text)
    except (PlanError, ValueError):
        return None
    return TimedAction(
        action=action,
        start_s=float(start),
        end_s=float(end),
        waited_s=min(float(waited), float(end - start)),
    )
