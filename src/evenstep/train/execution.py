"""How the forwards and backwards of an update are executed: a model that is one stage, or one in several.

It picks the plan for an update's micro-batches and hands it to the runner. It is chosen when the trainer is built; the
update and evaluations ask nothing about it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.names import named_parameters
from evenstep.optim.apply import norms
from evenstep.parallel import Group, Reducers, Single, Strategy, each_norm, squared_norm
from evenstep.pipeline import SCHEDULES, Layout, Op, Plan, Runner, Stage, Staged, Stages, forwards
from evenstep.train.cuts import Cuts
from evenstep.train.passage import Passage
from evenstep.train.staged_passage import StagedPassage

T = TypeVar("T")


class Execution(ABC):
    """Executes the micro-batches of updates and evaluations.

    Attributes:
        group: all ranks that train the model.
        strategy: how gradients are shared between data-parallel ranks.
        stages: that this rank runs; None where the model is not in stages.
        holds_output: whether this rank has the model's outputs for its micro-batches.
        passage: the kind that its micro-batches need.
    """

    group: Group
    strategy: Reducers
    stages: Stages | None = None
    holds_output: bool = True
    passage: type[Passage] = Passage

    @abstractmethod
    def train(
        self, microbatches: tuple[int, ...], passage: Passage, num_microbatches: int, *, last: bool = True
    ) -> None:
        """Add the gradients of `microbatches`, of all `num_microbatches` of the update, to `.grad`.

        Args:
            microbatches: of this rank.
            passage: of them.
            num_microbatches: over all ranks.
            last: whether no others follow: what is then in `.grad` is reduced.
        """

    @abstractmethod
    def evaluate(self, microbatches: tuple[int, ...], passage: Passage) -> None:
        """Run `microbatches` forward only."""

    @property
    def part_held(self) -> tuple[int, int]:
        """Which part of the state this rank holds without asking the others, and of how many."""
        return self.strategy.layout.shard_index, self.strategy.layout.num_shards

    def match(
        self,
        work: Sequence[T],
        unseen: Callable[[T], AbstractContextManager[Passage]],
        *,
        halve: Callable[[T], T | None],
        backward: bool,
        kind: str = "",
        last: bool = True,
    ) -> None:
        """Before `train` or `evaluate`: run passes that count nowhere, where all ranks must run the same number.

        Args:
            work: this rank's micro-batches.
            unseen: gives the passage of a micro-batch that counts nowhere.
            halve: gives half of a micro-batch, or None where it can't be cut.
            backward: whether they come back.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: as for `train`.
        """

    @abstractmethod
    def any_failed(self, failed: bool) -> bool:
        """See `PadsPasses.any_failed`."""

    def cut_alike(self, cuts: Cuts) -> None:
        """After a failed try: let ranks that run one plan together cut as finely as the one that must most."""

    @abstractmethod
    def begin(self) -> None:
        """The accumulation of an update begins, perhaps anew after a failed try."""

    @abstractmethod
    def spoil(self, num_microbatches: int, error: Exception) -> None:
        """See `Reducer.spoil`."""

    @abstractmethod
    def try_one(self, passage: Passage) -> None:
        """Run micro-batch 0 of `passage` forward and backward on this rank alone."""

    @abstractmethod
    def squared_norm(self, grads: list[Tensor]) -> Tensor | None:
        """‖g‖₂² over all that is trained; None where no rank has a gradient, as no task gave a loss.

        Args:
            grads: of this rank.
        """

    @abstractmethod
    def norms(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """‖v‖₂ of tensors that ranks hold as they hold the parameters of these names: whole, and alike on all ranks.

        Args:
            values: of this rank, by the name of a parameter; of one that stages share, one of them counts.
        """


@lru_cache(maxsize=1024)
def _one_stage(microbatches: tuple[int, ...]) -> Plan:
    return SCHEDULES["sequential"].plans(Layout.chain(ranks=1), microbatches)[0]


@lru_cache(maxsize=1024)
def _unreduced(microbatches: tuple[int, ...]) -> Plan:
    return tuple(action for action in _one_stage(microbatches) if action.op in (Op.FORWARD, Op.BACKWARD))


@final
class OneStage(Execution):
    """A model that each rank holds whole.

    Args:
        model: on its device.
        strategy: wraps it.
        optimizer: of its parameters.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, optimizer: Optimizer) -> None:
        self.group, self.strategy = strategy.group, Reducers(strategy)
        dtype = _norm_dtype({parameter.dtype for parameter in _of(optimizer)})
        self._norms = partial(norms, dtype=dtype)
        wrapped = self.strategy.wrap(model)
        self.strategy.adopt(optimizer)
        self._evaluator = Runner([Stage(0, model)], self.strategy)
        self._trainer = Runner([Stage(0, wrapped)], self.strategy)
        alone = Reducers(Single())
        alone.wrap(wrapped)
        self._alone = Runner([Stage(0, wrapped)], alone)
        self._wrapped = wrapped

    def train(
        self, microbatches: tuple[int, ...], passage: Passage, num_microbatches: int, *, last: bool = True
    ) -> None:
        plan = _one_stage(microbatches) if last else _unreduced(microbatches)
        try:
            self._trainer.run(plan, passage, num_microbatches)
        except RuntimeError as error:
            self._explain(error)
            raise

    def evaluate(self, microbatches: tuple[int, ...], passage: Passage) -> None:
        try:
            self._evaluator.run(forwards(Layout.chain(ranks=1), microbatches)[0], passage, len(microbatches))
        except RuntimeError as error:
            self._explain(error)
            raise

    def match(
        self,
        work: Sequence[T],
        unseen: Callable[[T], AbstractContextManager[Passage]],
        *,
        halve: Callable[[T], T | None],
        backward: bool,
        kind: str = "",
        last: bool = True,
    ) -> None:
        plan = _one_stage((0,)) if backward else forwards(Layout.chain(ranks=1), (0,))[0]

        def run(microbatch: T) -> None:
            try:
                with unseen(microbatch) as passage:
                    self._alone.run(plan, passage, 1)
            except RuntimeError as error:
                self._explain(error)
                raise

        self.strategy.match(work, run, halve=halve, backward=backward, kind=kind, last=last)

    def any_failed(self, failed: bool) -> bool:
        return self.strategy.any_failed(failed)

    def _explain(self, error: RuntimeError) -> None:
        """Raise what `error` means with this strategy, if that is known."""
        explained = self.strategy.explained(error)
        if explained is not error:
            raise explained from error

    def begin(self) -> None:
        self.strategy.begin()

    def spoil(self, num_microbatches: int, error: Exception) -> None:
        self.strategy.spoil(self._wrapped, num_microbatches, error)

    def try_one(self, passage: Passage) -> None:
        self._alone.run(_one_stage((0,)), passage, 1)

    def squared_norm(self, grads: list[Tensor]) -> Tensor | None:
        return squared_norm(self.strategy.layout, grads, self._norms) if grads else None

    def norms(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        each = each_norm(self.strategy.layout, [_dense(value) for value in values.values()], self._norms)
        return dict(zip(values, each.unbind(), strict=True))


@final
class Pipelined(Execution):
    """A model in stages.

    Args:
        model: on its device.
        strategy: each stage gets a reducer of it.
        optimizer: of this rank's parameters.
        device: of the model.

    Raises:
        ArgumentError: the strategy is not for these ranks.
    """

    def __init__(self, model: Staged, strategy: Strategy, optimizer: Optimizer, device: torch.device) -> None:
        if strategy.group.ranks != model.mesh.data.ranks:
            raise ArgumentError(
                f"the strategy must share gradients between the {model.mesh.data.ranks} data-parallel ranks of the "
                f"model's mesh, but has a group of {strategy.group.ranks}; build it from `mesh.data`."
            )
        self.group, self.strategy = model.mesh.world, Reducers(strategy, per_plan=True)
        self.passage = StagedPassage
        trained = {id(parameter) for parameter in _of(optimizer)}
        names = {name for name, parameter in named_parameters(model).items() if id(parameter) in trained}
        self._model = model
        self.stages = stages = Stages(model, self.strategy, device)
        self.holds_output = model.last in model.own
        self.strategy.adopt(optimizer)
        self._run = stages.run
        self._rank, self._pipeline = model.mesh.pipeline.rank, model.mesh.pipeline
        self._plan = lru_cache(maxsize=256)(self._planned)
        self._forwards = lru_cache(maxsize=256)(self._planned_forwards)
        self._slots = slots = {name: slot for slot, name in enumerate(model.parameter_names)}
        counted = [(slots[n], p) for n, p in named_parameters(model).items() if n in slots and n in names]
        self._counted = counted
        dtypes = {dtype for theirs in self._pipeline.gather({p.dtype for _, p in counted}) for dtype in theirs}
        self._norm_dtype = _norm_dtype(dtypes)
        self._norms = torch.zeros(
            len(slots), dtype=self._norm_dtype or next(iter(dtypes), torch.float32), device=device
        )

    def train(
        self, microbatches: tuple[int, ...], passage: Passage, num_microbatches: int, *, last: bool = True
    ) -> None:
        assert last, "all micro-batches of a model in stages are in one plan"
        assert isinstance(passage, StagedPassage)
        self._run(self._plan(passage.lay_out(microbatches)), passage, num_microbatches)

    def evaluate(self, microbatches: tuple[int, ...], passage: Passage) -> None:
        assert isinstance(passage, StagedPassage)
        self._run(self._forwards(passage.lay_out(microbatches)), passage, len(microbatches))

    def any_failed(self, failed: bool) -> bool:
        return failed  # a plan fails on all ranks of a pipeline

    @property
    def part_held(self) -> tuple[int, int]:
        place, places = super().part_held
        return self._pipeline.rank * places + place, self._pipeline.ranks * places

    def cut_alike(self, cuts: Cuts) -> None:
        known = [limit for limit in self._pipeline.gather(cuts.limit) if limit is not None]
        cuts.limit = min(known, default=None)

    def begin(self) -> None:
        self.strategy.begin()

    def spoil(self, num_microbatches: int, error: Exception) -> None:
        raise error

    def try_one(self, passage: Passage) -> None:
        raise AssertionError("refused when the trainer is built")

    def squared_norm(self, grads: list[Tensor]) -> Tensor | None:
        """Each parameter's norm has its place in one vector, which all ranks get: the same sum in the same order.

        Parameters without a gradient on any rank are left out, so that the sum is that of a model that is whole.
        """
        anywhere, each = self._each_norm([(slot, p.grad) for slot, p in self._counted if p.grad is not None])
        if len(anywhere) < len(each):
            each = each[torch.tensor(anywhere, dtype=torch.long, device=each.device)]
        return each.dot(each) if anywhere else None

    def norms(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        known = [(self._slots[name], _dense(value)) for name, value in values.items() if name in self._slots]
        anywhere, each = self._each_norm(known)
        names = list(self._slots)
        return {names[slot]: each[slot] for slot in anywhere}

    def _each_norm(self, present: list[tuple[int, Tensor]]) -> tuple[list[int], Tensor]:
        """Norms by slot, alike on all ranks, and the slots of which any rank has one."""
        each = torch.zeros_like(self._norms)
        having = {slot for slot, _ in present}
        counts = self._pipeline.sum_floats([float(slot in having) for slot in range(len(each))])
        anywhere = [slot for slot, count in enumerate(counts) if count]
        if present:
            places = torch.tensor([slot for slot, _ in present], device=each.device)
            each[places] = each_norm(
                self.strategy.layout, [g for _, g in present], partial(norms, dtype=self._norm_dtype)
            )
        self._pipeline.sum(each)()
        return anywhere, each

    def _planned_forwards(self, microbatches: tuple[int, ...]) -> Plan:
        return forwards(self._model.layout, microbatches)[self._rank]

    def _planned(self, microbatches: tuple[int, ...]) -> Plan:
        return self._model.schedule.plans(self._model.layout, microbatches)[self._rank]


def build_execution(model: nn.Module, strategy: Strategy, optimizer: Optimizer, device: torch.device) -> Execution:
    """The execution of this kind of model."""
    if isinstance(model, Staged):
        return Pipelined(model, strategy, optimizer, device)
    return OneStage(model, strategy, optimizer)


def _of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _dense(value: Tensor) -> Tensor:
    """Itself, or of a sparse tensor what is not 0."""
    return cast("Any", value.coalesce())._values() if value.is_sparse else value


def _norm_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """In which norms are computed: None for that of the gradients, where it is one and wide enough."""
    if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}:
        return None
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
