"""The one undo of an update: gradients, metrics, buffers, and the declared state of tasks."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from evenstep.data import GlobalBatch
from evenstep.data.tree import copied, tensors_in
from evenstep.errors import TaskError
from evenstep.internals import buffers_of, times_written
from evenstep.parallel import Dealing, Reducers
from evenstep.parallel.buffers import running_statistics
from evenstep.tensors import named_parameters
from evenstep.train.tasks.task import Task
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import TrainContext

_CHECKED = 2  # first updates of a run in which writes to parameters and batches are looked for


@final
class Buffers:
    """Copy of a model's buffers as of the last committed update.

    BatchNorm's running statistics change in the forward, before the verdict. A buffer that a forward replaces
    (`self.mean = …`) is put back in its place with the new values, so that an average that holds it sees them.

    Args:
        model: on its device already.

    >>> norm = nn.BatchNorm1d(1); buffers = Buffers(norm)
    >>> _ = norm(torch.tensor([[1.0], [3.0]])); buffers.restore(1.0); norm.running_mean
    tensor([0.])
    """

    def __init__(self, model: nn.Module) -> None:
        # torch's normalisation kernels write running statistics without raising the tensor's version
        silent = {id(buffer) for buffer in running_statistics(model)}
        registries = [buffers_of(module) for module in model.modules()]
        self._places = [(held, name) for held in registries for name, buffer in held.items() if buffer is not None]
        every: dict[int, Any] = {id(held[name]): held[name] for held, name in self._places}
        self._numbers = {key: number for number, key in enumerate(every)}
        self._number_of = [self._numbers[id(held[name])] for held, name in self._places]
        self._buffers: list[Tensor] = [*every.values()]
        self._silent = [key in silent for key in every]
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self._versions = [times_written(buffer) for buffer in self._buffers]

    def settle(self) -> None:
        """Write the tensor that replaced a buffer into the buffer itself, which others hold as well."""
        for (held, name), number in zip(self._places, self._number_of, strict=True):
            buffer, now = self._buffers[number], held.get(name)
            if now is buffer or now is None:
                continue
            if now.shape == buffer.shape and now.dtype == buffer.dtype and now.device == buffer.device:
                buffer.detach().copy_(now.detach())
                held[name] = buffer
            else:  # a table that has grown
                self._buffers[number] = now
                self._kept[number] = now.detach().clone()
                self._versions[number] = times_written(now)
                self._numbers[id(now)] = number

    def value(self, buffer: Tensor) -> Tensor:
        """Value of `buffer` after the last committed update."""
        return self._kept[self._numbers[id(buffer)]]

    def moved(self, buffer: Tensor) -> bool:
        """True if `buffer` was written to since the last committed update."""
        number = self._numbers[id(buffer)]
        return times_written(self._buffers[number]) != self._versions[number]

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """Undo changes of buffers at the end of the `with`; earlier changes stay."""
        self.settle()
        before = [(times_written(buffer), buffer.detach().clone()) for buffer in self._buffers]
        yield
        self.settle()
        for number, (version, value) in enumerate(before):
            buffer = self._buffers[number]
            if (self._silent[number] or times_written(buffer) != version) and buffer.shape == value.shape:
                buffer.detach().copy_(value)
                if version == self._versions[number]:
                    self._versions[number] = times_written(buffer)  # so it has not moved

    def restore(self, aborted: Tensor | float) -> None:
        """Take back the changes if `aborted` is 1, else keep them; a tensor decides on its device."""
        self.settle()
        for number, original in enumerate(self._buffers):
            if not self._silent[number] and times_written(original) == self._versions[number]:
                continue
            buffer, kept = original.detach(), self._kept[number]
            if buffer.shape != kept.shape:  # `resize_`: a table that has grown
                kept = self._kept[number] = buffer.clone()
            if isinstance(aborted, Tensor):
                buffer.copy_(torch.where(aborted > 0, kept, buffer))
            elif aborted:
                buffer.copy_(kept)
            kept.copy_(buffer)
            self._versions[number] = times_written(original)


@final
class Rollback:
    """Undoes the changes of an update's passes, unless the update is applied.

    Attributes:
        buffers: of the model.
    """

    def __init__(
        self, model: nn.Module, context: TrainContext, buffers: Buffers, reducers: Reducers, trained: TrainedParameters
    ) -> None:
        self.buffers = buffers
        self._storage = context.storage
        self._reducers = reducers
        self._trained = trained
        self._parameters = named_parameters(model)
        self._tasks = [one for one in context.tasks.values() if _may_have_state(one)]
        self._states: dict[int, list[dict[str, Any]]] = {}  # of tasks, before each update whose verdict is not known
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
        if self._tasks and self._update not in self._states:
            self._states[self._update] = self._task_states()
        return partial(self._undo, self._storage.mark())

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
            self._load_states(self._states.get(self._update, ()))
        else:
            self._batch = None
        self._states.pop(self._update, None)

    def settle(self, aborted: int | None) -> None:
        """All verdicts are known: restore the state of tasks before update `aborted`, the first that was aborted."""
        if aborted is not None:
            self._load_states(self._states.get(aborted, ()))
        self._states.clear()

    def take_back(self) -> None:
        """Roll back passes that were neither committed nor rolled back."""
        if self._is_unjudged:
            self.judge(1.0)

    def forget_gradients(self, dealing: Dealing | None = None) -> None:
        """Begin to accumulate gradients, perhaps again; of the micro-batches of `dealing`, if any follow."""
        for parameter in self._trained.with_grad:
            parameter.grad = None
        self._reducers.begin(dealing)

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """Restore buffers and the state of tasks at the end of the `with`."""
        states = self._task_states()
        try:
            with self.buffers.unchanged():
                yield
        finally:
            self._load_states(states)

    def _undo(self, mark: tuple[int, int]) -> None:
        self._storage.drop_after(mark)
        self.forget_gradients()
        self.buffers.restore(1.0)
        self._load_states(self._states.get(self._update, ()))
        self._check_batch()

    def _task_states(self) -> list[dict[str, Any]]:
        return [copied(task.state_dict()) for task in self._tasks]

    def _load_states(self, states: Sequence[dict[str, Any]]) -> None:
        for task, state in zip(self._tasks, states, strict=False):
            if state or task.state_dict():
                task.load_state_dict(copied(state))

    def _check_batch(self) -> None:
        if self._batch is not None and _versions_in(self._batch) != self._batch_versions:
            raise TaskError(
                f"the task has written into its batch in update {self._update}, so the update can't be done again. "
                f"Write into a copy (`x = x / 255` for `x.div_(255)`).",
                field="batch",
            )


def _may_have_state(task: Task) -> bool:
    return type(task).state_dict is not Task.state_dict or isinstance(task, nn.Module)


def _versions_in(batch: GlobalBatch) -> list[int]:
    tensors = [one for part in batch.microbatches for one in tensors_in(part.data)]
    return [0 if one.is_inference() else times_written(one) for one in tensors]


def _version_of(parameter: Tensor) -> int:
    return 0 if type(parameter.data) is not Tensor else times_written(parameter)
