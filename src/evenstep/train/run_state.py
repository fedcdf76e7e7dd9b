"""What a checkpoint holds of a run, as one tree, and back: its tensors, its counters, and where its data and hooks are.

Everything that can be compared is compared before anything is changed. The tensors by themselves are told in `state`,
and which part of a model in stages belongs to this rank in `portion`. It does not touch files, and it does not choose
when.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from evenstep.checkpoint import PartialCheckpoint, on_all_ranks, read_checkpoint
from evenstep.errors import CheckpointError
from evenstep.optim.ema import Ema
from evenstep.train.cuts import Cuts
from evenstep.train.evaluations import Evaluations
from evenstep.train.loop import Loop
from evenstep.train.portion import Portion, build_portion
from evenstep.train.progress import Progress
from evenstep.train.reporter import Reports
from evenstep.train.state import Saved, Tree, check_same_run, unwrapped, with_plain_names
from evenstep.train.task import Task

_PARTS = ("model", "optimizer", "progress", "data", "hooks", "storage", "run")


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
        data, ranks = self._state_of_data(), self.loop.execution.strategy.group
        states = ranks.gather(data) if self.loop.data.state_is_of_rank else [data]
        tensors = {**self.saved.state_dict(whole=whole), "trained": self.loop.update.trained.state_dict()}
        return self._with_counters(self.portion.gathered(tensors), dict(enumerate(states)))

    def part(self) -> Tree:
        """What this rank holds of it, without asking the others."""
        rank = self.loop.execution.strategy.rank if self.loop.data.state_is_of_rank else 0
        tensors = {**self.saved.part(), "trained": self.loop.update.trained.state_dict()}
        tensors = self.portion.part(tensors)
        if self._holds_copy:  # of what another rank writes as well
            tensors = {**tensors, "model": {}, "ema": {}, "optimizer": {**tensors["optimizer"], "state": {}}}
        return self._with_counters(tensors, {rank: self._state_of_data()})

    @property
    def part_held(self) -> tuple[int, int]:
        """Which part of the state `part` gives, and of how many: each rank's own, where each has data of its own."""
        execution = self.loop.execution
        if self.loop.data.state_is_of_rank:
            return execution.group.rank, execution.group.ranks
        return execution.part_held

    @property
    def _holds_copy(self) -> bool:
        strategy = self.loop.execution.strategy
        return self.loop.data.state_is_of_rank and strategy.rank >= strategy.layout.num_shards

    def _state_of_data(self) -> Tree:
        """What this rank's data need to go on at the committed position."""
        return self.loop.data.state_dict(self.loop.progress.position)

    def _with_counters(self, tensors: Tree, data: dict[int, Tree]) -> Tree:
        loop = self.loop
        return {
            **tensors,
            "progress": loop.progress.state_dict(),
            "data": {
                "fingerprint": loop.data.fingerprint(),
                "ranks": loop.execution.strategy.ranks if loop.data.state_is_of_rank else 0,
                "states": data,
            },
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
        data = self._data_of_same_run(state)
        state = self.portion.own(with_plain_names(state))
        return self._restored(self._own_part(state, self.saved.layout.scatter_like), data)

    def load_checkpoint(self, path: Path) -> tuple[Path, list[str]]:
        """Restore what is in the checkpoint at `path`; gives its folder, and what `load_state_dict` says.

        Where each rank holds a part, it reads only that, and all ranks verify the files together; else each reads and
        verifies the whole.

        Raises:
            CheckpointError: it is not there, damaged, or of another run. Nothing has been changed, on any rank.
        """
        execution = self.loop.execution
        if not execution.in_stages and execution.strategy.layout.divides == "nothing":
            whole = read_checkpoint(path)
            return whole.path, self.load_state_dict(whole.state)
        group, layout = execution.group, self.saved.layout

        def take(live: Tensor, value: Tensor) -> Tensor:
            return checkpoint.read(value, like=live) if value.is_meta else layout.scatter_like(live, value)

        checkpoint = on_all_ranks(group, lambda: PartialCheckpoint(path, _is_dealt_out))
        data = on_all_ranks(group, lambda: self._data_of_same_run(checkpoint.state))
        state = self.portion.own(with_plain_names(checkpoint.state))
        own = on_all_ranks(group, lambda: self._own_part(state, take))
        checkpoint.verify(group)
        return checkpoint.path, self._restored(own, data)

    def _data_of_same_run(self, state: Tree) -> Tree:
        """The state of this rank's data, from a state that is one of this run.

        Raises:
            CheckpointError: it is not.
        """
        loop = self.loop
        lacking = [part for part in _PARTS if part not in state]
        if lacking:
            raise CheckpointError(
                f"a state to load must be what a trainer's `state_dict` gave, but this one has no "
                f"{', '.join(f'`{part}`' for part in lacking)}; to begin with a model's weights only, load them into "
                f"the model before the trainer is built."
            )
        check_same_run(
            {**state["run"], "data": state["data"]["fingerprint"]},
            {"seed": loop.seed, "precision": loop.precision.name, "data": loop.data.fingerprint()},
        )
        return self._own_data(state["data"])

    def _own_part(self, state: Tree, take: Callable[[Tensor, Tensor], Tensor]) -> Tree:
        """What this rank holds of a state that fits; see `Saved.own_part`."""
        self.saved.check(state)
        check_tasks_fit(state.get("tasks", {}), self.tasks)
        return self.saved.own_part(state, take)

    def _restored(self, state: Tree, data: Tree) -> list[str]:
        """Take over this rank's part of a state, and the state of its data."""
        loop = self.loop
        changed = loop.bus.load_state_dict(state["hooks"])
        for name, theirs in state.get("tasks", {}).items():
            self.tasks[name].load_state_dict(theirs)
        loop.data.load_state_dict(data)
        changed += self.saved.load_state_dict(state)
        loop.update.trained.load_state_dict(state.get("trained", {}))
        loop.update.learning_rates.reloaded()
        loop.storage.load_state_dict(state["storage"])
        loop.progress = Progress.from_state_dict(state["progress"])
        self.evaluations.all_at = state["run"]["evaluated_at"]
        self._load_cuts(state["run"].get("cuts", []))
        return changed

    def _own_data(self, saved: Tree) -> Tree:
        """The state of this rank's data.

        Raises:
            CheckpointError: each rank has data of its own, and they were as many as there are now.
        """
        strategy, of_rank = self.loop.execution.strategy, self.loop.data.state_is_of_rank
        now = strategy.ranks if of_rank else 0
        # before each rank's was kept, there was the first one's
        states = saved.get("states", {0: saved.get("state")})
        then = saved.get("ranks", int(of_rank))
        if then != now:
            raise CheckpointError(
                f"the checkpoint says where the streams of {then} {_ranks(then)} are, but this run has {now}: each "
                f"rank reads a stream of its own, and nobody knows how what {then} have left is dealt over {now}. "
                f"Resume on {then} {_ranks(then)}; or start a new run with a stream that all ranks read whole "
                f"(`StreamData(…, shared=True)`) or with `MapData`, which go on on any number of ranks."
            )
        return states[strategy.rank if of_rank else 0]

    def _load_cuts(self, limits: list[int | None]) -> None:
        """Cut as finely as this rank did; on another number of ranks, and in stages, as the one that did so most."""
        execution = self.loop.execution
        if not execution.strategy.cuts_alone:
            return
        known = [limit for limit in limits if limit is not None]
        same = len(limits) == execution.group.ranks and not execution.in_stages
        self.cuts.limit = limits[execution.group.rank] if same else min(known, default=None)


def _is_dealt_out(name: str) -> bool:
    """Whether ranks may hold different parts of the tensor `PART/NAME` of a checkpoint."""
    return name.startswith(("model/", "ema/", "optimizer/state."))


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


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
    portion = build_portion(loop.model, loop.execution.trainer.peers.wire)
    saved = Saved(
        model=unwrapped(loop.model),
        optimizer=optimizer,
        names=names,
        layout=loop.execution.strategy.layout,
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
