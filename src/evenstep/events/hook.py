"""The seam for what people add to a run: a class whose methods are called before and after each part of it.

A hook overrides the methods that it needs; the others cost nothing. It sees the trainer through a weak reference,
may ask it to stop, save or evaluate, and may keep state that checkpoints carry. It does not change the update.
"""

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn, optim

from evenstep.errors import HookError
from evenstep.events.event import (
    BackwardBegin,
    BackwardEnd,
    EpochBegin,
    EpochEnd,
    EvaluateBegin,
    EvaluateEnd,
    ForwardBegin,
    ForwardEnd,
    Incident,
    Json,
    MicrobatchBegin,
    MicrobatchEnd,
    SaveBegin,
    SaveEnd,
    StepBegin,
    StepEnd,
    TrainBegin,
    TrainEnd,
    UpdateBegin,
    UpdateEnd,
)
from evenstep.events.storage import Storage

T = TypeVar("T")


class HookProgress(Protocol):
    """How far the run is, as a hook sees it."""

    @property
    def update(self) -> int: ...
    @property
    def samples(self) -> int: ...


class HookPhases(Protocol):
    """Where the time goes, as a hook sees it."""

    def take(self) -> dict[str, float]: ...


class HookTrainer(Protocol):
    """The trainer, as a hook sees it: what it may read, and what it may ask for at the next end of an update."""

    @property
    def progress(self) -> HookProgress: ...
    @property
    def phases(self) -> HookPhases: ...
    @property
    def updates(self) -> int | None: ...
    @property
    def storage(self) -> Storage: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> optim.Optimizer: ...
    @property
    def hooks(self) -> "tuple[Hook, ...]": ...
    @property
    def keeps_average(self) -> bool: ...
    @property
    def group_names(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def folder(self) -> Path | None: ...
    @property
    def is_first_rank(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def evaluations(self) -> Mapping[str, object]: ...
    @property
    def layout(self) -> Mapping[str, Json]: ...
    @property
    def resumed_from(self) -> str | None: ...
    def norms(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def settle(self) -> None: ...
    def first_rank_does(self, act: Callable[[], T]) -> T: ...
    def request_stop(self, reason: str, *, requeue: bool = False) -> None: ...
    def request_save(self) -> None: ...
    def request_evaluate(self) -> None: ...


class Hook:
    """Base of all hooks: every method does nothing.

    `priority` orders hooks (lower first); hooks of equal priority keep the order in which they were given. An `after_`
    method is called whenever the hook's own `before_` was called and did not raise, also on failure. Each rank has its
    own instance; a hook that is `first_rank_only` (one that prints or writes for the run) is only called on rank 0.
    `failure_policy` says what an error in the hook does: "stop" ends the run, "continue" reports it as an incident;
    None leaves it to the run's `Failures(hook=…)`. A hook that averages the models of ranks that train one each
    (`Single(ranks)`) says `averages_ranks = True`.

    >>> class StopAt(Hook):
    ...     def after_update(self, event: UpdateEnd) -> None:
    ...         if event.update == 10:
    ...             self.trainer.request_stop("ten are enough")
    >>> StopAt().name
    'StopAt'
    """

    priority: int = 0
    first_rank_only: bool = False
    failure_policy: Literal["stop", "continue"] | None = None
    averages_ranks: bool = False
    _trainer: "weakref.ref[HookTrainer] | None" = None

    @property
    def name(self) -> str:
        """What messages and checkpoints call this hook; the class name unless overridden."""
        return type(self).__name__

    @property
    def trainer(self) -> HookTrainer:
        """The trainer that this hook was given to.

        Raises:
            HookError: when there is none, or it is gone.
        """
        if self._trainer is None:
            raise HookError(
                f"hook `{self.name}` has no trainer yet; give it to one: Trainer(hooks=[...]).", field=self.name
            )
        trainer = self._trainer()
        if trainer is None:
            raise HookError(
                f"the trainer of hook `{self.name}` is gone; keep a reference to it while you use the hook.",
                field=self.name,
            )
        return trainer

    def attach(self, trainer: HookTrainer) -> None:
        """Become a hook of `trainer`, which is referred to weakly."""
        self._trainer = weakref.ref(trainer)

    def prepare(self, model: nn.Module) -> None:
        """Change layers of the model, before its optimizer is built: in a run file that is done, in a script call it.

        Names, shapes and objects of parameters stay those that it leaves for the whole run.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of this hook: a tree of dict, list, str, int, float, bool, None and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Take back what `state_dict` gave; with an empty one only where it is not empty now, as after going back.

        What of it is not taken, because this hook was built with other arguments, may be given as half a sentence.
        """

    def kept_checkpoints(self) -> tuple[str, ...]:
        """The names of checkpoint folders that must not be deleted to make room."""
        return ()

    def before_train(self, event: TrainBegin) -> None: ...
    def after_train(self, event: TrainEnd) -> None: ...
    def before_epoch(self, event: EpochBegin) -> None: ...
    def after_epoch(self, event: EpochEnd) -> None: ...
    def before_update(self, event: UpdateBegin) -> None: ...
    def after_update(self, event: UpdateEnd) -> None: ...
    def before_microbatch(self, event: MicrobatchBegin) -> None: ...
    def after_microbatch(self, event: MicrobatchEnd) -> None: ...
    def before_forward(self, event: ForwardBegin) -> None: ...
    def after_forward(self, event: ForwardEnd) -> None: ...
    def before_backward(self, event: BackwardBegin) -> None: ...
    def after_backward(self, event: BackwardEnd) -> None: ...
    def before_step(self, event: StepBegin) -> None: ...
    def after_step(self, event: StepEnd) -> None: ...
    def before_evaluate(self, event: EvaluateBegin) -> None: ...
    def after_evaluate(self, event: EvaluateEnd) -> None: ...
    def before_save(self, event: SaveBegin) -> None: ...
    def after_save(self, event: SaveEnd) -> None: ...
    def on_incident(self, event: Incident) -> None: ...
