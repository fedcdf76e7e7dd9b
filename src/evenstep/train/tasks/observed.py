"""A task in the place of another, for passes in which its outputs are looked at and nothing is trained.

It prepares batches as the other does, and its loss is 0. What is looked at, a subclass says.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from evenstep.train.tasks.task import Task


class ObservedTask(Task):
    """Another task, whose outputs are only observed."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def observed(self) -> Task:
        """The other task."""
        return self._task

    def transform(self, batch: Any) -> Any:
        return self._task.transform(batch)

    def inputs(self, batch: Any) -> Any:
        return self._task.inputs(batch)

    def postprocess(self, output: Any, batch: Any) -> Any:
        return self._task.postprocess(output, batch)

    def split(self, batch: Any) -> list[Any]:
        return self._task.split(batch)

    def loss(self, output: Any, batch: Any) -> Tensor:
        self.observe(output, batch)
        return torch.zeros(())

    @abstractmethod
    def observe(self, output: Any, batch: Any) -> None:
        """See the model's output for a batch."""


def behind(task: Task) -> Task:
    """The task whose outputs are observed; any other is itself."""
    return task.observed if isinstance(task, ObservedTask) else task
