"""State of a run as a dict of parts: the parts of its engine, "data", "hooks", and "storage" for metrics.

All parts are compared before any is changed; a part that is reset is left out.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from torch import Tensor

from evenstep.checkpoint import CheckpointReader, Replica, on_all_ranks, outline
from evenstep.checkpoint.shard import whole_shard
from evenstep.data import Data
from evenstep.errors import CheckpointError
from evenstep.internals import unwrapped
from evenstep.options import Reset
from evenstep.parallel import mapped
from evenstep.tensors import state_of
from evenstep.train.engine import Engine
from evenstep.train.state import Tree
from evenstep.train.state.pipeline_state import once_per_tensor
from evenstep.train.state.settings import MAY_CHANGE, check_parts, check_same_run, without

if TYPE_CHECKING:
    from evenstep.train.evaluate import Evaluator
    from evenstep.train.requests import Requests

_PARTS = ("model", "optimizer", "progress", "data", "hooks", "storage", "run")
_OF_EACH_RANK = ("model", "optimizer", "ema", "precision", "trained", "training", "tasks")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run.

    Args:
        epochs: length of the run, where it is given in epochs.
        config: saved as it is.
    """

    engine: Engine
    data: Data
    epochs: int | None
    evaluator: "Evaluator"
    requests: "Requests"
    config: dict[str, Any]

    def state_dict(self, *, whole: bool) -> Tree:
        """The state of all ranks, which call it together; `whole=False` keeps tensors that are cut over ranks."""
        engine = self.engine
        rank, ranks = self._stream
        states = {rank: self.data.state_dict(engine.progress.position)}
        if self._reads_own_stream:
            states = {rank: state for one in engine.reducers.data_group.gather(states) for rank, state in one.items()}
        state = engine.state.state_dict(whole=whole)
        state["run"] |= {
            "evaluate": self.requests.evaluate,
            "evaluated_at": dict(self.evaluator.evaluated_at),
            "cuts": engine.parts.context.cuts.limit,
            "config": self.config,
        }
        state |= {
            "data": {"fingerprint": self._fingerprint(), "ranks": ranks, "states": states},
            "hooks": engine.bus.state_dict(),
            "storage": engine.storage.state_dict(),
        }
        return self._of_all_ranks(state, whole=whole) if self.holds_own_model else state

    def _of_all_ranks(self, state: Tree, *, whole: bool) -> Tree:
        group = self.engine.group
        own = {part: state[part] for part in _OF_EACH_RANK}
        if whole:
            everybody = group.gather(own)
        else:  # each rank writes its own tensors
            everybody = group.gather(mapped(own, once_per_tensor(outline)))
            everybody[group.rank] = mapped(own, once_per_tensor(whole_shard))
        others = {str(rank): theirs for rank, theirs in enumerate(everybody) if rank}
        return {**state, **everybody[0], "each_rank": others}

    def _of_this_rank(self, state: Tree) -> Tree:
        others = state.get("each_rank")
        if others is None or not self.holds_own_model:  # of ranks that trained one model together: all begin with it
            return state
        group = self.engine.group
        if len(others) + 1 != group.ranks:
            raise CheckpointError(
                f"the checkpoint is of {len(others) + 1} ranks that train a model each, but this run has "
                f"{group.ranks}; resume on as many ranks, or begin with its weights by `load_weights`."
            )
        return {**state, **others.get(str(group.rank), {})}

    def replica(self) -> Replica | None:
        """Replicated parameters and buffers, to compare before a save; None where each rank trains its own model."""
        if self.holds_own_model:
            return None
        execution, layout = self.engine.parts.execution, self.engine.reducers.layout
        place = execution.pipeline.rank, layout.shard_index if layout.divides == "elements" else 0
        state = state_of(unwrapped(self.engine.model))
        return Replica(place=place, tensors={name: one for name, one in state.items() if isinstance(one, Tensor)})

    @property
    def holds_own_model(self) -> bool:
        """True if each rank trains its own model."""
        return self.engine.reducers.group.ranks < self.engine.reducers.data_group.ranks

    @property
    def is_on_each_rank(self) -> bool:
        """True if each rank holds the whole state, so that `state_dict` does not communicate."""
        shared = self._reads_own_stream or self.holds_own_model
        return self.engine.group.ranks == 1 or (not shared and self.engine.parts.execution.num_parts == 1)

    @property
    def _reads_own_stream(self) -> bool:
        return self.data.scope == "rank"

    @property
    def _stream(self) -> tuple[int, int]:
        group = self.engine.reducers.data_group
        return (group.rank, group.ranks) if self._reads_own_stream else (0, 0)

    def _fingerprint(self) -> Tree:
        return {name: value for name, value in self.data.fingerprint().items() if name != "cut"}

    def load_state_dict(self, state: Tree) -> list[str]:
        """Restore a state of `state_dict`; returns messages about reset or changed parts.

        Raises:
            CheckpointError: it does not fit. Nothing has been changed.
        """
        state = self._checked(self._of_this_rank(state))
        return self._restore(self.engine.state.own_part(state))

    def load_checkpoint(
        self, path: Path, *, new_settings: bool, reset: Collection[Reset] = ()
    ) -> tuple[Path, list[str]]:
        """Restore the checkpoint at `path`; gives its folder, and the texts of `load_state_dict`.

        Each rank reads the part that it holds, once; ranks with different parts verify every byte together. Settings of
        updates may be `new_settings`; the parts `reset` are left out.
        """
        engine, group, layout = self.engine, self.engine.group, self.engine.reducers.layout
        is_divided = engine.parts.execution.in_stages or layout.divides != "nothing" or layout.num_shards > 1
        is_divided = is_divided and not group.can_change  # other ranks may join later

        def opened() -> CheckpointReader:
            reader = CheckpointReader(path)
            reader.load(_is_dealt_out if is_divided else None)
            return reader

        def take(live: Tensor, value: Tensor) -> Tensor:
            return reader.read(value, like=live) if value.is_meta else layout.like(live, value)

        reader = on_all_ranks(group, opened)
        try:
            state = self._of_this_rank(reader.state)
            checked = on_all_ranks(group, lambda: self._checked(state, reset))
            own = engine.state.own_part(checked, take=take, ranks=group)
            on_all_ranks(group, lambda: self._check_settings(own, reader.path, new_settings=new_settings))
        finally:  # damage is the first cause to tell
            if is_divided:
                reader.verify(group)
            else:
                on_all_ranks(group, reader.verify)
        return reader.path, [*self._restore(own), *(f"`{part}` is reset" for part in reset)]

    def _checked(self, state: Tree, reset: Collection[Reset] = ()) -> Tree:
        check_parts(state, _PARTS, "a trainer")
        left = without(state, reset) if reset else state
        saved, own = dict(left["run"]), self.engine.state.identity
        if "data" not in left:
            check_same_run(saved, own)
            return left
        check_same_run({**saved, "data": left["data"]["fingerprint"]}, {**own, "data": self._fingerprint()})
        rank, ranks = self._stream
        then = left["data"]["ranks"]
        if then != ranks or rank not in left["data"]["states"]:
            raise CheckpointError(
                f"the checkpoint has the places of {then} streams, but this run reads {ranks}: resume on as many ranks "
                f"as saved it. `StreamData(…, shared=True)` and `MapData` resume on any number of ranks.",
                field="data",
            )
        return left

    def _check_settings(self, own: Tree, path: Path, *, new_settings: bool) -> None:
        begun, schedule = own["run"].get("begun"), self.engine.parts.lr_schedule
        if begun and schedule is not None:
            planned = self._planned(begun.get("data", 0))
            schedule.check(None if planned is None else max(planned - begun.get("lr_schedule", 0), 1))
        texts = self.engine.state.changed_settings(own)
        changed = {name: text for name, text in texts.items() if name not in MAY_CHANGE}
        if changed and not new_settings:
            raise CheckpointError(
                f"the checkpoint was made with other settings, so going on from it would be another run: "
                f"{'; '.join(changed.values())}. Keep the old settings; or accept the new ones by "
                f'`trainer.resume(…, new_settings=True)`, in a run file another `name` and `resume = "{path}"`.',
                field=next(iter(changed)),
            )

    def _planned(self, begun_at: int) -> int | None:
        if self.epochs is None:
            return self.engine.parts.core.learning_rates.updates
        count = updates_of(self.data, self.epochs, self.engine.parts.seed)
        return None if count is None else begun_at + count

    def _restore(self, own: Tree) -> list[str]:
        engine, run = self.engine, own["run"]
        engine.parts.core.is_whole = False  # hooks and data may raise; the engine, which is loaded last, makes it whole
        changed = engine.bus.load_state_dict(own["hooks"])
        if "data" in own:
            self.data.load_state_dict(own["data"]["states"][self._stream[0]])
        changed += engine.state.load(own)
        begun_at = engine.state.begun.get("data", 0)
        if self.epochs is not None and begun_at:
            engine.parts.stretch(self._planned(begun_at))
        if "storage" in own:
            engine.storage.load_state_dict(own["storage"])
        self.requests.evaluate = run["evaluate"]
        self.evaluator.evaluated_at = dict(run["evaluated_at"])
        engine.parts.context.cuts.limit = run["cuts"]
        return changed


def updates_of(data: Data, epochs: int, seed: int) -> int | None:
    """Number of updates in so many epochs; None if only reading the data tells."""
    counts = [data.num_batches(epoch, seed=seed) for epoch in range(epochs)]
    return None if None in counts else sum(cast("list[int]", counts))


def _is_dealt_out(name: str) -> bool:
    return name.startswith(("model/", "ema/", "optimizer/state."))
