"""State of an engine: the tensors of `TrainState`, counters, states of tasks, and a description of the run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from evenstep.checkpoint import ALONE, RankGroup, on_all_ranks
from evenstep.optim.optimizers import Modes
from evenstep.train.ledger import Ledger
from evenstep.train.progress import Progress
from evenstep.train.state import Tree
from evenstep.train.state.settings import changed_settings
from evenstep.train.state.train_state import TrainState
from evenstep.train.tasks.tasks import check_task_states, states_of
from evenstep.train.update.context import TrainContext


@final
@dataclass(slots=True, kw_only=True)
class EngineState:
    """State of an engine.

    Args:
        settings: of updates, as plain values.
        begun: updates at which parts of the run were reset.
    """

    saved: TrainState
    ledger: Ledger
    context: TrainContext
    modes: Modes
    settings: Tree
    begun: Tree = field(default_factory=Tree)

    @property
    def identity(self) -> Tree:
        """Values that a resumed run must have in common with the saved one."""
        return {"seed": self.context.seed, "precision": self.context.precision.name}

    def state_dict(self, *, whole: bool) -> Tree:
        """The state of all ranks, which call it together; see `TrainState.state_dict`."""
        self.ledger.core.require_whole()
        run: Tree = {**self.identity, "settings": self.settings, "begun": self.begun}
        if self.modes.names:  # optimizers that evaluate other parameters than those they train, which a state holds
            run["trained_by"] = ", ".join(self.modes.names)
        return {
            **self.saved.state_dict(whole=whole),
            "progress": self.ledger.progress.state_dict(),
            "tasks": states_of(self.context.tasks),
            "lr_schedule": self.ledger.core.learning_rates.state_dict(),
            "run": run,
        }

    def changed_settings(self, state: Tree) -> dict[str, str]:
        """Messages about settings of updates that differ from a state of `own_part`, by name."""
        told = changed_settings(state["run"].get("settings", {}), self.settings)
        options = "; ".join(self.saved.changed_options(state))
        frozen = self.saved.trained.changed(state.get("trained", {}))
        return {name: said for name, said in {"optimizer": options, "frozen": frozen, **told}.items() if said}

    def own_part(
        self, state: Tree, *, take: Callable[[Tensor, Tensor], Tensor] | None = None, ranks: RankGroup = ALONE
    ) -> Tree:
        """This rank's part of a whole state, compared with the live one; see `TrainState.own_part`."""
        own = self.saved.own_part(state, take=take, ranks=ranks)
        on_all_ranks(ranks, lambda: check_task_states(own.get("tasks", {}), self.context.tasks))
        return own

    def load(self, state: Tree) -> list[str]:
        """Restore a state of `own_part`; returns messages about reset or dropped parts."""
        core = self.ledger.core
        changed = [*self.changed_settings(state).values()]
        core.is_whole = False  # until all of it is loaded
        self.ledger.progress = Progress.from_state_dict(state["progress"])
        for name, theirs in state.get("tasks", {}).items():
            task = self.context.tasks.get(name)
            if task is not None and (theirs or task.state_dict()):
                task.load_state_dict(theirs)
        changed += self.saved.load_state_dict(state)
        changed += core.learning_rates.load_state_dict(state.get("lr_schedule", {}))
        self.begun = state["run"].get("begun") or {}
        core.learning_rates.reloaded(self.begun.get("lr_schedule", 0))
        core.is_whole = True
        return changed
