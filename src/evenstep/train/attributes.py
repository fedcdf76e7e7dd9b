"""What of a trainer may be read, and the little that may be set, once it is built.

Most of what a trainer was given has gone into its parts, so that setting an attribute would have no effect. Such an
assignment is an error that says what to do instead. What can be changed between two calls of `train` is how many
updates there are.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from evenstep.checkpoint import ended_on_all
from evenstep.errors import ArgumentError, HookError
from evenstep.events import Hook, Json
from evenstep.events.hooks.target import MetricTarget
from evenstep.parallel import Group
from evenstep.pipeline import PipelineModel
from evenstep.single_use import not_copied
from evenstep.train.phases import Phases
from evenstep.train.progress import Progress
from evenstep.train.update.gradient_norms import check_like_parameters

if TYPE_CHECKING:
    from evenstep.pipeline import Stage
    from evenstep.train.loop import Loop

T = TypeVar("T")


class TrainerAttributes:
    """The base of the trainer: its public attributes."""

    _is_built = False
    _is_training = False
    _thread = 0  # in which it trains
    _is_over = False  # while hooks are told that training has ended
    _has_trained = False
    _loop: "Loop"
    _group: Group
    _sharing: str

    def __setattr__(self, name: str, value: Any) -> None:
        settable = getattr(getattr(type(self), name, None), "fset", None)
        if self._is_built and not name.startswith("_") and settable is None:
            self._refuse(name)
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_copied("a trainer")

    @property
    def updates(self) -> int | None:
        """How many updates the run commits; None where only the data know.

        It can be set between two calls of `train`, to go on for longer or to end earlier; an LR schedule then stretches
        over that many. On several ranks all set the same.
        """
        return self._loop.engine.core.learning_rates.updates

    @updates.setter
    def updates(self, updates: int) -> None:
        loop = self._loop
        if self._is_training:
            raise ArgumentError(
                "`updates` of a trainer can't be set while it trains; call `request_stop` to end it now, or set it "
                "between two calls of `train`."
            )
        if loop.updates is None:
            raise ArgumentError(
                f"`updates` of a trainer that was given `epochs` can't be set; build another trainer with "
                f"`updates={updates}`, and let it `resume` or `load_state_dict`.",
                field="updates",
            )
        if type(updates) is not int or updates < max(self.progress.update, 1):
            raise ArgumentError(
                f"`updates` must be a whole number of at least the {self.progress.update} that are committed, but is "
                f"{updates!r}.",
                field="updates",
            )
        loop.engine.stretch(updates)
        loop.updates = updates

    @property
    def is_first_rank(self) -> bool:
        return self._group.rank == 0

    @property
    def rank(self) -> int:
        """The number of this process among those that train the model."""
        return self._group.rank

    @property
    def hooks(self) -> tuple[Hook, ...]:
        return tuple(self._loop.engine.bus.hooks)

    @property
    def keeps_average(self) -> bool:
        return self._loop.engine.parts.saved.average is not None

    @property
    def progress(self) -> Progress:
        """The counters of committed work."""
        return self._loop.engine.progress

    @property
    def phases(self) -> Phases:
        return self._loop.engine.phases

    @property
    def group_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each of the optimizer's groups, also of those that other ranks step.

        Of a model in stages they are those of this rank's stages.
        """
        return tuple(tuple(group) for group in self._loop.engine.core.trained.names)

    @property
    def layout(self) -> dict[str, Json]:
        model, own = self._loop.engine.model, {"ranks": self._group.ranks, "strategy": self._sharing}
        if not isinstance(model, PipelineModel):
            return {**own}
        stages, schedule = model.layout, model.schedule.name
        return {**own, "pipeline": stages.ranks, "stages": stages.stages, "pipeline_schedule": schedule}

    @property
    def group(self) -> Group:
        """All ranks of the run."""
        return self._group

    @property
    def stages(self) -> "Mapping[int, Stage]":
        return self._loop.engine.parts.execution.trainer.stages

    @property
    def resumed_from(self) -> str | None:
        return self._loop.checkpointer.resumed_from

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The names of the modules whose activations are computed again instead of kept, of all stages."""
        return self._loop.engine.recomputed

    @property
    def in_float8(self) -> tuple[str, ...]:
        """The names of the linear layers whose products are in float8, of all stages."""
        return self._loop.engine.in_float8

    def norms(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """‖v‖₂ of tensors that are held as the parameters of these names are, such as gradients, on every strategy.

        Norms are whole, over shards and stages, and alike on all ranks, which call it together. They stay on their
        device.

        Args:
            values: by the name of a parameter that the optimizer holds: those that this rank has.

        Raises:
            ArgumentError: a name that is none of these, or a value that is not like its parameter.
        """
        check_like_parameters(values, self._loop.engine.model)
        return self._loop.engine.parts.execution.norms.each(values)

    def settle(self) -> None:
        """Learn which updates were committed; where one was not, `progress` is before it, and it is made again.

        A hook that changes the model between two updates calls it first (in `after_update`), on all ranks: what an
        accelerator has not yet told may be that the last updates are to be made again, with the model as it was.
        """
        self._check_idle("settle", "call it in `after_update`")
        self._loop.settle_between_updates(write=False)

    def first_rank_does(self, act: Callable[[], T]) -> T:
        """Do something on the first rank only, for which the others wait as long as it takes; all ranks call it.

        Raises:
            EvenstepError: on the other ranks, when it raised on the first.
        """
        group = self._group
        if group.ranks == 1:
            return act()
        job = ended_on_all(group, lambda: act() if group.rank == 0 else None)
        return group.first_rank_does(cast("Callable[[], T]", job.result))

    def _check_idle(self, what: str, advice: str) -> None:
        """Raise ArgumentError where `what` is called in the midst of an update or an evaluation, by a hook, the task or
        another thread, which does not know when that is.
        """
        if self._is_training and get_ident() != self._thread:
            raise ArgumentError(
                f"`{what}` was called while another thread trains, which goes on meanwhile, so that it would find "
                f"parameters of two updates; {advice}."
            )
        computes = self._loop.engine.core.is_computing
        if computes or self._loop.evaluator.is_running:
            midst = f"update {self.progress.update + 1}" if computes else "an evaluation"
            raise ArgumentError(
                f"`{what}` was called in the midst of {midst}, by a hook or the task, when nothing of it is complete; "
                f"{advice}."
            )

    def _check_in_time(self, what: str, instead: str) -> None:
        if self._is_over:
            raise ArgumentError(
                f"`request_{what}` was called in `after_train`, when no update follows at whose end it could be done; "
                f"call it in `after_update` or `after_evaluate`, or `{instead}` when `train` has returned."
            )

    def _check_not_training(self, what: str) -> None:
        if self._is_training:
            raise ArgumentError(
                f"`{what}` was called while it trains, by a hook or the task, so that the run would not know where it "
                f'is; call it before `train`. To go back within a run: `failures=Failures(non_finite="rewind")`, or '
                f"`loss_spike`."
            )

    def _check_evaluates(self) -> None:
        if not self._loop.evaluator.sets:
            raise ArgumentError(
                "this trainer has nothing to evaluate on: give it `evaluations={'valid': MapData(dataset, "
                "global_batch_size=32, shuffle=False)}`."
            )

    def _check_hooks(self) -> None:
        for hook in self._loop.engine.bus.hooks:
            if cast("object", hook.trainer) is not self:
                raise HookError(
                    f"hook `{hook.name}` has been given to another trainer since, and would act on that one; make one "
                    f"for each."
                )

    def _check_followed(self) -> None:
        for hook in self._loop.engine.bus.hooks:
            target = getattr(hook, "follows", None)
            if isinstance(target, MetricTarget):
                target.check(hook, asked=self._loop.reporter.asks)

    def _refuse(self, name: str) -> None:
        if name in signature(type(self).__init__).parameters or hasattr(self, name):
            raise ArgumentError(
                f"`{name}` of a trainer can't be set once it is built: it would have no effect. Build another trainer "
                f"with the new `{name}`; with `resume`, or `load_state_dict(old.state_dict())`, it goes on where this "
                f"one is.",
                field=name,
            )
        raise ArgumentError(
            f"a trainer has no `{name}` that could be set; keep it in an object of your own, such as a hook.",
            field=name,
        )
