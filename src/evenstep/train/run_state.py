"""What a checkpoint holds of a run, as one tree, and back: its tensors, its counters, and where its data and hooks are.

Everything that can be compared is compared before anything is changed. The tensors by themselves are told in `state`,
and which part of a model in stages belongs to this rank in `portion`. It does not touch files, and it does not choose
when.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.optim import Optimizer

from evenstep.errors import CheckpointError
from evenstep.optim.ema import Ema
from evenstep.train.cuts import Cuts
from evenstep.train.evaluations import Evaluations
from evenstep.train.loop import Loop
from evenstep.train.portion import Portion, build_portion
from evenstep.train.progress import Progress
from evenstep.train.reports import Reports
from evenstep.train.state import Saved, Tree, check_same_run, unwrapped, with_plain_names
from evenstep.train.task import Task


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run.

    Args:
        loop: with its data, hooks, metrics and counters.
        saved: the tensors.
        portion: which part of the whole model this rank holds.
        evaluations: that know when they were last made.
        cuts: of this rank.
        reports: that know how finely each rank cuts.
        tasks: by name, of which some have a state.
        config: kept as it is.
    """

    loop: Loop
    saved: Saved
    portion: Portion
    evaluations: Evaluations
    cuts: Cuts
    reports: Reports
    tasks: Mapping[str, Task]
    config: dict[str, Any]

    def state_dict(self, *, whole: bool) -> Tree:
        """Everything that the run needs to go on exactly; on all ranks together.

        Args:
            whole: False to leave tensors that are cut over ranks as they are.
        """
        tensors = {**self.saved.state_dict(whole=whole), "trained": self.loop.update.trained.state_dict()}
        return self._with_counters(self.portion.gathered(tensors))

    def part(self) -> Tree:
        """What this rank holds of it, without asking the others."""
        tensors = {**self.saved.part(), "trained": self.loop.update.trained.state_dict()}
        return self._with_counters(self.portion.part(tensors))

    def _with_counters(self, tensors: Tree) -> Tree:
        loop = self.loop
        return {
            **tensors,
            "progress": loop.progress.state_dict(),
            "data": {"fingerprint": loop.data.fingerprint(), "state": loop.data.state_dict()},
            "hooks": loop.bus.state_dict(),
            "tasks": {name: state for name, task in self.tasks.items() if (state := task.state_dict())},
            "storage": loop.storage.state_dict(),
            "run": {
                "seed": loop.seed,
                "precision": loop.precision.name,
                "evaluated_at": self.evaluations.all_at,
                "cuts": self.reports.limits,
                "config": self.config,
            },
        }

    def load_state_dict(self, state: Tree) -> list[str]:
        """Restore what `state_dict` gave; says, in half sentences, what began afresh or was given up.

        Raises:
            CheckpointError: it is of another model, optimizer, data, seed or precision. Nothing has been changed.
        """
        loop = self.loop
        check_same_run(
            {**state["run"], "data": state["data"]["fingerprint"]},
            {"seed": loop.seed, "precision": loop.precision.name, "data": loop.data.fingerprint()},
        )
        state = self.portion.own(with_plain_names(state))
        self.saved.check(state)
        tasks = state.get("tasks", {})
        check_tasks_fit(tasks, self.tasks)
        changed = loop.bus.load_state_dict(state["hooks"])
        for name, theirs in tasks.items():
            self.tasks[name].load_state_dict(theirs)
        loop.data.load_state_dict(state["data"]["state"])
        changed += self.saved.load_state_dict(state)
        loop.update.trained.load_state_dict(state.get("trained", {}))
        loop.update.learning_rates.reloaded()
        loop.storage.load_state_dict(state["storage"])
        loop.progress = Progress.from_state_dict(state["progress"])
        self.evaluations.all_at = state["run"]["evaluated_at"]
        self._load_cuts(state["run"].get("cuts", []))
        return changed

    def _load_cuts(self, limits: list[int | None]) -> None:
        """Cut as finely as this rank did; on another number of ranks, and in stages, as the one that did so most."""
        execution = self.loop.execution
        if not execution.strategy.cuts_alone:
            return
        known = [limit for limit in limits if limit is not None]
        same = len(limits) == execution.group.ranks and execution.stages is None
        self.cuts.limit = limits[execution.group.rank] if same else min(known, default=None)


def build_run_state(
    loop: Loop,
    optimizer: Optimizer,
    names: list[list[str]],
    ema: Ema | None,
    evaluations: Evaluations,
    cuts: Cuts,
    reports: Reports,
    tasks: Mapping[str, Task],
    config: dict[str, Any],
) -> RunState:
    """The state of the run of `loop`; the average begins as a copy of what the parameters are now.

    Args:
        loop, evaluations, cuts, reports, tasks, config: see `RunState`.
        optimizer, ema: of the run.
        names: of the optimizer's groups' parameters, over all ranks.
    """
    portion = build_portion(loop.model, loop.execution.stages)
    saved = Saved(
        model=unwrapped(loop.model),
        optimizer=optimizer,
        names=names,
        strategy=loop.execution.strategy,
        ema=ema,
        precision=loop.precision,
    )
    return RunState(
        loop=loop,
        saved=saved,
        portion=portion,
        evaluations=evaluations,
        cuts=cuts,
        reports=reports,
        tasks=tasks,
        config=config,
    )


def check_tasks_fit(saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    """Raise CheckpointError unless the tasks that have a state are those whose state was saved."""
    missing = [name for name, task in tasks.items() if name not in saved and task.state_dict()]
    surplus = [name for name in saved if name not in tasks]
    faults = [f"has no state of {_said(name)}, which has some" for name in missing]
    faults += [f"has a state of {_said(name)}, which this run has not" for name in surplus]
    if faults:
        raise CheckpointError(
            f"the checkpoint {' and '.join(faults)}, so going on from it would not be exact; resume with the tasks "
            f"that it was saved with."
        )


def _said(name: str) -> str:
    return f"task `{name}`" if name else "the task"
