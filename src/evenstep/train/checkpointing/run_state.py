"""State of a run as one tree, and its restoring. Everything is compared before anything is changed."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from torch import Tensor

from evenstep.checkpoint import CheckpointReader, on_all_ranks
from evenstep.data import Data
from evenstep.errors import CheckpointError
from evenstep.options import Reset
from evenstep.parallel import Group
from evenstep.train.engine import Engine
from evenstep.train.reporter import Reporter
from evenstep.train.state import Tree
from evenstep.train.state.afresh import begun_afresh
from evenstep.train.state.each_rank import of_all_ranks, of_one_rank, own_of
from evenstep.train.state.settings import MAY_CHANGE, check_same_run
from evenstep.train.tasks.tasks import states_of

if TYPE_CHECKING:
    from evenstep.train.evaluations import Evaluations
    from evenstep.train.requests import Requests

_WANTED = "a trainer's `state_dict`"
_PARTS = ("model", "optimizer", "progress", "data", "hooks", "storage", "run")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run.

    Args:
        epochs: how long the run is, where that is not said in updates.
        evaluations: that know when they were last made.
        requests: that know whether one is still to be made.
        reporter: that knows how finely each rank cuts.
        config: kept as it is.
    """

    engine: Engine
    data: Data
    epochs: int | None
    evaluations: "Evaluations"
    requests: "Requests"
    reporter: Reporter
    config: dict[str, Any]

    def state_dict(self, *, whole: bool) -> Tree:
        """Everything that the run needs to go on exactly; on all ranks together.

        Args:
            whole: False to leave tensors that are cut over ranks as they are.
        """
        data = self._own_data()
        if self._has_state_of_rank:
            everybody = self.engine.reducers.data_group.gather(data["states"])
            data["states"] = {rank: state for theirs in everybody for rank, state in theirs.items()}
        state = self._with_counters(self.engine.tensors(whole=whole), data)
        return of_all_ranks(state, self.engine.group, whole=whole) if self._holds_own_model else state

    def part(self) -> Tree:
        tensors = self.engine.held_tensors()
        if self._holds_copy:  # of what another rank writes as well
            tensors = {**tensors, "model": {}, "ema": {}, "optimizer": {**tensors["optimizer"], "state": {}}}
        state = self._with_counters(tensors, self._own_data())
        return of_one_rank(state, self.engine.group.rank) if self._holds_own_model else state

    @property
    def _holds_own_model(self) -> bool:
        reducers = self.engine.reducers
        return reducers.ranks < reducers.data_group.ranks

    @property
    def part_held(self) -> tuple[int, int]:
        if self._has_state_of_rank or self._holds_own_model:
            return self.engine.group.rank, self.engine.group.ranks
        return self.engine.parts.execution.part_held

    @property
    def _holds_copy(self) -> bool:
        reducers = self.engine.reducers
        return self._has_state_of_rank and reducers.rank >= reducers.layout.num_shards and not self._holds_own_model

    @property
    def _place_of_data(self) -> tuple[int, int]:
        group = self.engine.reducers.data_group
        return (group.rank, group.ranks) if self._has_state_of_rank else (0, 0)

    @property
    def _has_state_of_rank(self) -> bool:
        return self.data.state is not None and self.data.state.scope == "rank"

    def _own_data(self) -> Tree:
        rank, ranks = self._place_of_data
        state = {} if self.data.state is None else self.data.state.state_dict(self.engine.progress.position)
        return {"fingerprint": self._fingerprint(), "ranks": ranks, "states": {rank: state}}

    def _fingerprint(self) -> Tree:
        return {name: value for name, value in self.data.fingerprint().items() if name != "cut"}

    def _with_counters(self, tensors: Tree, data: Tree) -> Tree:
        engine = self.engine
        return {
            **tensors,
            "progress": engine.progress.state_dict(),
            "data": data,
            "hooks": engine.bus.state_dict(),
            "tasks": states_of(engine.parts.context.tasks),
            "lr_schedule": engine.core.learning_rates.state_dict(),
            "storage": engine.storage.state_dict(),
            "run": {
                **engine.described(),
                "evaluate": self.requests.evaluate,
                "evaluated_at": dict(self.evaluations.evaluated_at),
                "cuts": self.reporter.limits,
                "config": self.config,
            },
        }

    def load_state_dict(self, state: Tree) -> list[str]:
        state = self._of_this_rank(state)
        data = self._data_of_same_run(state)
        own = self.engine.own_part(state)
        return self._restored(own, data)

    def load_checkpoint(
        self, path: Path, *, new_settings: bool, reset: Collection[Reset] = ()
    ) -> tuple[Path, list[str]]:
        """Restore the checkpoint at `path`; gives its folder, and the messages of `load_state_dict`.

        Each rank reads what it holds, once; where that is a part, they verify every byte together.

        Args:
            path: as for a `CheckpointReader`.
            new_settings: whether updates may be made with other settings than those that were saved.
            reset: what begins afresh.
        """
        group, layout = self.engine.group, self.engine.reducers.layout
        is_divided = self.engine.parts.execution.in_stages
        is_divided = is_divided or layout.divides != "nothing" or layout.num_shards > 1
        is_divided = is_divided and not group.can_change  # the others may not be there yet, and get their part later

        def opened() -> CheckpointReader:
            reader = CheckpointReader(path)
            reader.load(_is_dealt_out if is_divided else None)
            return reader

        def take(live: Tensor, value: Tensor) -> Tensor:
            return reader.read(value, like=live) if value.is_meta else layout.scatter_like(live, value)

        def verify() -> None:
            if is_divided:
                reader.verify(group)
            else:  # each has read the whole, and may be the only one that is there yet
                on_all_ranks(group, reader.verify)

        reader = on_all_ranks(group, opened)
        state = self._afresh(self._of_this_rank(reader.state), reset)
        try:
            data = on_all_ranks(group, lambda: self._data_of_same_run(state))
            own = self.engine.own_part(state, take=take, ranks=group)
            on_all_ranks(group, lambda: self._check_settings(own, reader.path, new_settings=new_settings))
        except Exception:
            verify()  # if a file is damaged, that is why it does not fit
            raise
        verify()
        return reader.path, [*self._restored(own, data), *_said_of(reset, own)]

    def _of_this_rank(self, state: Tree) -> Tree:
        return own_of(state, self.engine.group if self._holds_own_model else Group())

    def _afresh(self, state: Tree, reset: Collection[Reset]) -> Tree:
        if not reset or not {"progress", "run", "hooks"} <= state.keys():
            return state
        return begun_afresh(state, reset, self._own_data())

    def _planned(self, begun_at: int) -> int | None:
        count = updates_of(self.data, cast("int", self.epochs), self.engine.seed)
        return None if count is None else begun_at + count

    def _data_of_same_run(self, state: Tree) -> Tree:
        engine = self.engine
        lacking = [part for part in _PARTS if part not in state]
        if lacking:
            raise CheckpointError(
                f"a state to load must be what a trainer's `state_dict` gave, but this one has no "
                f"{', '.join(f'`{part}`' for part in lacking)}; to begin with a model's weights only, "
                f"`evenstep.load_weights(model, PATH)` before the trainer is built (`init_from.path` in a run file)."
            )
        check_same_run(
            {**state["run"], "data": state["data"]["fingerprint"]},
            {"seed": engine.seed, "precision": engine.precision.name, "data": self._fingerprint()},
        )
        return self._data_of_rank(state["data"])

    def _check_settings(self, own: Tree, path: Path, *, new_settings: bool) -> None:
        begun, rates = own["run"].get("begun"), self.engine.core.learning_rates
        if begun:
            planned = rates.updates if self.epochs is None else self._planned(begun.get("data", 0))
            rates.check(begun.get("lr_schedule", 0), planned)
        changed = self.engine.changed_settings(own)
        refused = [said for name, said in changed.items() if name not in MAY_CHANGE]
        if refused and not new_settings:
            raise CheckpointError(
                f"the checkpoint was made with other settings, so going on from it would be another run: "
                f"{'; '.join(refused)}. Keep what was; or, if the new ones are meant from here on, say so: "
                f'`trainer.resume(…, new_settings=True)`, in a run file another `name` and `resume = "{path}"`.'
            )

    def _restored(self, own: Tree, data: Tree) -> list[str]:
        self.engine.core.is_whole = False  # hooks and data may raise; the engine, which comes last, makes it whole
        changed = self.engine.bus.load_state_dict(own["hooks"])
        if self.data.state is not None:
            self.data.state.load_state_dict(data)
        changed += self.engine.load_own(own)
        if self.epochs is not None and (begun_at := (own["run"].get("begun") or {}).get("data", 0)):
            self.engine.stretch(self._planned(begun_at))
        if own["storage"] is not None:
            self.engine.storage.load_state_dict(own["storage"])
        self.requests.evaluate = own["run"].get("evaluate", False)
        self.evaluations.evaluated_at = dict(own["run"].get("evaluated_at", {}))
        self._load_cuts(own["run"].get("cuts", []))
        return changed

    def _data_of_rank(self, saved: Tree) -> Tree:
        mine, now = self._place_of_data
        states, then = saved["states"], saved["ranks"]
        if then != now:
            raise CheckpointError(
                f"the checkpoint says where the streams of {then} {_ranks(then)} are, but this run has {now}: each "
                f"rank reads a stream of its own, and nobody knows how what {then} have left is dealt over {now}. "
                f"Resume on {then} {_ranks(then)}; or start a new run with a stream that all ranks read whole "
                f"(`StreamData(…, shared=True)`, in a run file `data.shared = true`) or with `MapData`, which go on on "
                f"any number of ranks."
            )
        if mine not in states:
            raise CheckpointError(
                f"a state to load must be what a trainer's `state_dict` gave, but its `data` has nothing of rank "
                f"{mine}; give the state as it was."
            )
        return states[mine]

    def _load_cuts(self, limits: list[int | None]) -> None:
        group = self.engine.group
        known = [limit for limit in limits if limit is not None]
        same = len(limits) == group.ranks and not self.engine.parts.execution.in_stages
        self.engine.parts.context.cuts.limit = limits[group.rank] if same else min(known, default=None)


def _said_of(reset: Collection[Reset], own: Tree) -> list[str]:
    update = own["progress"]["update"]
    told = {
        "optimizer": "the optimizer begins afresh, with the options that it was built with",
        "lr_schedule": f"the LR schedule counts from update {update}",
        "metrics": "nothing is known of earlier metrics",
        "data": "the data begin with their first batch",
    }
    return [told[one] for one in reset]


def updates_of(data: Data, epochs: int, seed: int) -> int | None:
    counts = [data.num_batches(epoch, seed=seed) for epoch in range(epochs)]
    return None if None in counts else sum(cast("list[int]", counts))


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _is_dealt_out(name: str) -> bool:
    return name.startswith(("model/", "ema/", "optimizer/state."))
