"""What stands in for Lightning's trainer while a module is trained: it knows few things, and refuses all else."""

from typing import Any, final

from evenstep.errors import ArgumentError, TaskError
from evenstep.train.tasks.task import Task


@final
class TrainerStandIn:
    """What stands in for Lightning's trainer: what it knows here it gives, all else is refused."""

    def __init__(self, name: str, updates: int | None) -> None:
        self._name, self._updates = name, updates
        self._asked = False
        self._task: Task | None = None

    @property
    def global_step(self) -> int:
        if self._task is None:
            return 0
        now = self._task.now
        return now.update - now.is_training

    @property
    def estimated_stepping_batches(self) -> int:
        if self._updates is None:
            raise ArgumentError(
                f"`{self._name}` asks `self.trainer.estimated_stepping_batches`; say how many it will be, "
                f"`parts(module, updates=…)`."
            )
        self._asked = True
        return self._updates

    @property
    def said_updates(self) -> int | None:
        return self._updates if self._asked else None

    @property
    def max_steps(self) -> int:
        """The same."""
        return self.estimated_stepping_batches

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("__"):
            raise AttributeError(asked)
        raise TaskError(
            f"`{self._name}` asks `{asked}` of Lightning's trainer, which does not run here; do it in an "
            f"`evenstep.Hook`, and log in the module's own steps."
        )
