"""Undoes an attempt at an update: gradients, metrics, buffers, and the declared state of tasks."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from evenstep.data import GlobalBatch
from evenstep.data.tree import copied, tensors_in
from evenstep.errors import TaskError
from evenstep.internals import times_written
from evenstep.parallel import Dealing
from evenstep.tensors import named_parameters
from evenstep.train.buffers import Buffers
from evenstep.train.tasks.task import Task
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution

_CHECKED = 2  # first updates of a run in which writes to parameters and batches are looked for


@final
class Rollback:
    """Undoes what the passes of an update changed, unless the update is applied.

    Attributes:
        buffers: of the model.
    """

    def __init__(
        self, model: nn.Module, context: TrainContext, execution: Execution, trained: TrainedParameters
    ) -> None:
        self.buffers = Buffers(model)
        self._parameters = named_parameters(model)
        self._context, self._execution, self._trained = context, execution, trained
        self._states = TaskStates(context.tasks.values())
        self._update = 0
        self._batch: GlobalBatch | None = None
        self._in_batch: list[int] = []
        self._in_model: list[int] = []
        self._num_begun = 0
        self._is_unjudged = False  # passes have begun, and neither commit nor roll-back has followed

    def begin(self, update: int, batch: GlobalBatch) -> None:
        """Begin an update, perhaps again: changes that the user made to buffers since the last one stay."""
        if batch is not self._batch:
            self._batch, self._in_batch = batch, _versions_in(batch)
            self._num_begun += 1
        self._update = update
        if self._num_begun <= _CHECKED:
            self._in_model = [*map(_version_of, self._parameters.values())]
        self.follow()

    def follow(self) -> None:
        """Take buffers as they are now."""
        self.buffers.restore(0.0)

    def begin_passes(self) -> Callable[[], None]:
        """Begin passes; gives the function that undoes an attempt that has failed."""
        self._check_batch()
        self._is_unjudged = True
        self._states.begin(self._update)
        return partial(self._undo, self._context.storage.mark())

    def check_writes(self) -> None:
        """Raise TaskError where the passes of one of the first updates wrote to a parameter or to the batch."""
        if self._num_begun > _CHECKED:
            return
        self._check_batch()
        for (name, parameter), before in zip(self._parameters.items(), self._in_model, strict=True):
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
        self._states = TaskStates(self._context.tasks.values())

    def take_back(self) -> None:
        if self._is_unjudged:
            self.judge(1.0)

    def forget_gradients(self, dealing: Dealing | None = None) -> None:
        """Begin to accumulate gradients, perhaps again; of the micro-batches of `dealing`, if any follow."""
        for parameter in self._trained.with_grad:
            parameter.grad = None
        self._execution.begin(dealing)

    @contextmanager
    def unchanged(self) -> Generator[None]:
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
        if self._batch is not None and _versions_in(self._batch) != self._in_batch:
            raise TaskError(
                f"the task has written into its batch in update {self._update}, so the update can't be done again. "
                f"Write into a copy (`x = x / 255` for `x.div_(255)`).",
                field="batch",
            )


class _State(NamedTuple):
    update: int
    task: Task
    state: dict[str, Any]


class TaskStates:
    """Declared state of tasks (`state_dict`) before each update whose verdict is not known.

    >>> class Counts(Task):
    ...     seen = 0
    ...     loss = lambda self, output, batch: output
    ...     state_dict = lambda self: {"seen": self.seen}
    ...     load_state_dict = lambda self, state: vars(self).update(state)
    >>> task = Counts(); states = TaskStates([task]); states.begin(1)
    >>> task.seen += 1; states.restore(1); task.seen
    0
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = [
            one for one in tasks if type(one).state_dict is not Task.state_dict or isinstance(one, nn.Module)
        ]
        self._kept: list[_State] = []

    def begin(self, update: int) -> None:
        """Keep the state before an update, or before another attempt at it."""
        if not any(one.update == update for one in self._kept):
            self._kept += [_State(update, task, copied(task.state_dict())) for task in self._tasks]

    def restore(self, update: int) -> None:
        """Load the state before an update, and forget that of later ones."""
        for one in self._kept:
            if one.update == update and (one.state or one.task.state_dict()):
                one.task.load_state_dict(copied(one.state))

    def forget(self, update: int) -> None:
        """Forget the state before an update that has been committed or rolled back."""
        self._kept = [one for one in self._kept if one.update != update]


def _versions_in(batch: GlobalBatch) -> list[int]:
    tensors = [one for part in batch.microbatches for one in tensors_in(part.data)]
    return [0 if one.is_inference() else times_written(one) for one in tensors]


def _version_of(parameter: Tensor) -> int:
    return 0 if type(parameter.data) is not Tensor else times_written(parameter)
