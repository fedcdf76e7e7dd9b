"""Undoes an attempt at an update: gradients, metrics, buffers, and the declared state of tasks."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from evenstep.data import GlobalBatch
from evenstep.data.tree import copied, tensors_in
from evenstep.errors import TaskError
from evenstep.internals import times_written
from evenstep.parallel import Dealing
from evenstep.tensors import named_parameters
from evenstep.train.tasks.task import Task
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution

_CHECKED = 2  # first updates of a run in which writes to parameters and batches are looked for


@final
class Rollback:
    """Undoes the changes of an update's passes, unless the update is applied.

    Attributes:
        buffers: of the model.
    """

    def __init__(
        self, model: nn.Module, context: TrainContext, execution: Execution, trained: TrainedParameters
    ) -> None:
        self.buffers = execution.buffers
        self._parameters = named_parameters(model)
        self._context = context
        self._execution = execution
        self._trained = trained
        self._states = TaskStates(context.tasks.values())
        self._update = 0
        self._batch: GlobalBatch | None = None
        self._batch_versions: list[int] = []
        self._parameter_versions: list[int] = []
        self._num_begun = 0
        self._is_unjudged = False  # passes have begun, and neither commit nor roll-back has followed

    def begin(self, update: int, batch: GlobalBatch) -> None:
        """Begin an update, perhaps again: changes that the user made to buffers since the last one stay."""
        self._update = update
        if batch is self._batch:
            self._check_batch()
        else:
            self._batch = batch
            self._batch_versions = _versions_in(batch)
            self._num_begun += 1
        if self._num_begun <= _CHECKED:
            self._parameter_versions = [*map(_version_of, self._parameters.values())]
        self.follow()

    def follow(self) -> None:
        """Take buffers as they are now."""
        self.buffers.restore(0.0)

    def begin_passes(self) -> Callable[[], None]:
        """Begin passes; gives the function that undoes a failed attempt."""
        self._is_unjudged = True
        self._states.begin(self._update)
        return partial(self._undo, self._context.storage.mark())

    def check_writes(self) -> None:
        """Raise TaskError where the passes of one of the first updates wrote to a parameter or to the batch."""
        if self._num_begun > _CHECKED:
            return
        self._check_batch()
        for (name, parameter), before in zip(self._parameters.items(), self._parameter_versions, strict=True):
            if _version_of(parameter) != before:
                raise TaskError(
                    f"the forward of update {self._update} has written to the parameter `{name}`, which no roll-back "
                    f"restores. Compute with a changed copy, or change it once per update in `after_update`.",
                    field=name,
                )

    def judge(self, aborted: Tensor | float) -> None:
        """Roll back where `aborted` is 1, else keep the changes; a tensor decides on its device."""
        self.buffers.restore(aborted)
        self._is_unjudged = False
        if isinstance(aborted, Tensor):  # known after `settle`
            return
        if aborted:
            self._states.restore(self._update)
        else:
            self._batch = None
        self._states.forget(self._update)

    def settle(self, aborted: int | None) -> None:
        """All verdicts are known: restore the state of tasks before update `aborted`, the first that was aborted."""
        if aborted is not None:
            self._states.restore(aborted)
        self._states.forget(None)

    def take_back(self) -> None:
        """Roll back passes that were neither committed nor rolled back."""
        if self._is_unjudged:
            self.judge(1.0)

    def forget_gradients(self, dealing: Dealing | None = None) -> None:
        """Begin to accumulate gradients, perhaps again; of the micro-batches of `dealing`, if any follow."""
        for parameter in self._trained.with_grad:
            parameter.grad = None
        self._execution.reducers.begin(dealing)

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """Restore buffers and the state of tasks at the end of the `with`."""
        states = TaskStates(self._context.tasks.values())
        states.begin(0)
        try:
            with self.buffers.unchanged():
                yield
        finally:
            states.restore(0)

    def _undo(self, mark: tuple[int, int]) -> None:
        self._context.storage.drop_after(mark)
        self.forget_gradients()
        self.buffers.restore(1.0)
        self._states.restore(self._update)
        self._check_batch()

    def _check_batch(self) -> None:
        if self._batch is not None and _versions_in(self._batch) != self._batch_versions:
            raise TaskError(
                f"the task has written into its batch in update {self._update}, so the update can't be done again. "
                f"Write into a copy (`x = x / 255` for `x.div_(255)`).",
                field="batch",
            )


@final
class TaskStates:
    """Declared state of tasks (`state_dict`) before each update whose verdict is not known."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = [one for one in tasks if _may_have_state(one)]
        self._before: dict[int, list[dict[str, Any]]] = {}  # states of the tasks, by the number of the update

    def begin(self, update: int) -> None:
        """Keep the state before an update, or before another attempt at it."""
        if self._tasks and update not in self._before:
            self._before[update] = [copied(task.state_dict()) for task in self._tasks]

    def restore(self, update: int) -> None:
        """Load the state before an update."""
        for task, state in zip(self._tasks, self._before.get(update, ()), strict=False):
            if state or task.state_dict():
                task.load_state_dict(copied(state))

    def forget(self, update: int | None) -> None:
        """Forget the state before an update that has been committed or rolled back; None: before all."""
        if update is None:
            self._before.clear()
        else:
            self._before.pop(update, None)


def _may_have_state(task: Task) -> bool:
    return type(task).state_dict is not Task.state_dict or isinstance(task, nn.Module)


def _versions_in(batch: GlobalBatch) -> list[int]:
    tensors = [one for part in batch.microbatches for one in tensors_in(part.data)]
    return [0 if one.is_inference() else times_written(one) for one in tensors]


def _version_of(parameter: Tensor) -> int:
    return 0 if type(parameter.data) is not Tensor else times_written(parameter)
