"""Base class of hooks: methods that are called before and after each part of a run."""

import weakref
from pathlib import Path
from typing import Any, Literal

from torch import nn

from evenstep.errors import HookError
from evenstep.events.event import (
    EpochEvent,
    EvaluateEvent,
    Incident,
    MicrobatchEvent,
    SaveEvent,
    StepEvent,
    TrainEvent,
    UpdateEvent,
)


class Hook:
    """Base of all hooks. Override the methods that you need; the others cost nothing.

    An `after_` method is called whenever the hook's `before_` method was called and did not raise, also on failure.
    Each rank has its own instance.

    >>> class StopAt(Hook):
    ...     def after_update(self, event: UpdateEvent) -> None:
    ...         if event.update == 10:
    ...             self.trainer.request_stop("ten are enough")
    >>> StopAt().name
    'StopAt'
    """

    priority: int = 0
    """Hooks with a lower number come first; equal ones stay in the given order."""
    first_rank_only: bool = False
    """Call the hook on rank 0 only, for hooks that print or write files."""
    failure_policy: Literal["stop", "continue"] | None = None
    """"stop" lets an error end the run, "continue" makes it an incident; None follows `Failures(hook=…)`."""
    draws: bool = True
    """The methods may draw random numbers, which are then keyed; of False, drawn numbers depend on the layout."""
    averages_ranks: bool = False
    """The hook averages models that ranks train independently (`Single(ranks)`)."""
    _trainer: "weakref.ref[Any] | None" = None

    @property
    def name(self) -> str:
        """Name in messages and checkpoints: the name of the class, unless overridden."""
        return type(self).__name__

    @property
    def trainer(self) -> Any:
        """The `Trainer` of this hook: read it, or request something for the end of the update."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None:
            raise HookError(
                f"hook `{self.name}` has no trainer; pass it to one, `Trainer(hooks=[…])`.", field=self.name
            )
        return trainer

    def attach(self, trainer: object) -> None:
        """Set the trainer, by a weak reference."""
        self._trainer = weakref.ref(trainer)

    def prepare(self, model: nn.Module) -> None:
        """Change layers of the model before its optimizer is built; in scripts, call it yourself."""

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints: containers, numbers and texts of Python and numpy, and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore `state_dict`; returns, in half a sentence, what other arguments keep from being restored."""

    def kept_checkpoints(self) -> tuple[str, ...]:
        """Names of checkpoint folders that must not be deleted."""
        return ()

    def needs_settled(self, update: int) -> bool:
        """True if `after_update` of `update` needs to know that it was committed, as it changes the model."""
        return False

    def poll(self) -> None:
        """Called between the batches of an evaluation; a stop that is requested here with `requeue` breaks it off."""

    def before_train(self, event: TrainEvent) -> None: ...
    def after_train(self, event: TrainEvent) -> None: ...
    def before_epoch(self, event: EpochEvent) -> None: ...
    def after_epoch(self, event: EpochEvent) -> None: ...
    def before_update(self, event: UpdateEvent) -> None: ...
    def after_update(self, event: UpdateEvent) -> None: ...
    def before_microbatch(self, event: MicrobatchEvent) -> None: ...
    def after_microbatch(self, event: MicrobatchEvent) -> None: ...
    def before_forward(self, event: MicrobatchEvent) -> None: ...
    def after_forward(self, event: MicrobatchEvent) -> None: ...
    def before_backward(self, event: MicrobatchEvent) -> None: ...
    def after_backward(self, event: MicrobatchEvent) -> None: ...
    def before_step(self, event: StepEvent) -> None: ...
    def after_step(self, event: StepEvent) -> None: ...
    def before_evaluate(self, event: EvaluateEvent) -> None: ...
    def after_evaluate(self, event: EvaluateEvent) -> None: ...
    def before_save(self, event: SaveEvent) -> None: ...
    def after_save(self, event: SaveEvent) -> None: ...
    def on_incident(self, event: Incident) -> None: ...


def run_folder(hook: Hook) -> Path:
    """The run folder of a hook that writes files; HookError if the trainer has none."""
    if hook.trainer.folder is None:
        raise HookError(f"hook `{hook.name}` needs a run folder; give the trainer a `folder`.", field=hook.name)
    return hook.trainer.folder
