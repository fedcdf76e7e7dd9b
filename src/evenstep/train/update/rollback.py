"""The one undo of an update: gradients, metrics, buffers, and the declared state of tasks."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from evenstep.train.update.microbatch import TrainContext

_CHECKED = 2  # first updates of a run in which writes to parameters and batches are looked for


@dataclass(slots=True)
class _Buffer:
    tensor: Tensor
    kept: Tensor  # as of the last committed update
    version: int
    is_silent: bool  # torch's normalisation kernels write running statistics without raising the tensor's version
    places: list[tuple[dict[str, Tensor | None], str]]

    @property
    def has_moved(self) -> bool:
        return times_written(self.tensor) != self.version

    def remember(self) -> None:
        self.kept = self.tensor.detach().clone()
        self.version = times_written(self.tensor)


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
        silent = {id(buffer) for buffer in running_statistics(model)}
        self._by_id: dict[int, _Buffer] = {}
        for held in (buffers_of(module) for module in model.modules()):
            for name, tensor in held.items():
                if tensor is not None:
                    new = _Buffer(tensor, tensor, 0, id(tensor) in silent, [])
                    self._by_id.setdefault(id(tensor), new).places.append((held, name))
        self._all = [*self._by_id.values()]
        for one in self._all:
            one.remember()

    def settle(self) -> None:
        """Write the tensor that replaced a buffer into the buffer itself, which others hold as well."""
        for one in self._all:
            for held, name in one.places:
                now, tensor = held.get(name), one.tensor
                if now is tensor or now is None:
                    continue
                if now.shape == tensor.shape and now.dtype == tensor.dtype and now.device == tensor.device:
                    tensor.detach().copy_(now.detach())
                    held[name] = tensor
                else:  # a table that has grown
                    one.tensor = now
                    one.remember()
                    self._by_id[id(now)] = one

    def value(self, buffer: Tensor) -> Tensor:
        """Value of `buffer` after the last committed update."""
        return self._by_id[id(buffer)].kept

    def moved(self, buffer: Tensor) -> bool:
        """True if `buffer` was written to since the last committed update."""
        return self._by_id[id(buffer)].has_moved

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """Undo changes of buffers at the end of the `with`; earlier changes stay."""
        self.settle()
        before = [(one, times_written(one.tensor), one.tensor.detach().clone()) for one in self._all]
        yield
        self.settle()
        for one, version, value in before:
            if (one.is_silent or times_written(one.tensor) != version) and one.tensor.shape == value.shape:
                one.tensor.detach().copy_(value)
                if version == one.version:
                    one.version = times_written(one.tensor)  # so it has not moved

    def restore(self, aborted: Tensor | float) -> None:
        """Take back the changes if `aborted` is 1, else keep them; a tensor decides on its device."""
        self.settle()
        for one in self._all:
            if not one.is_silent and not one.has_moved:
                continue
            buffer = one.tensor.detach()
            if buffer.shape != one.kept.shape:  # `resize_`: a table that has grown
                one.kept = buffer.clone()
            if isinstance(aborted, Tensor):
                buffer.copy_(torch.where(aborted > 0, one.kept, buffer))
            elif aborted:
                buffer.copy_(one.kept)
            one.kept.copy_(buffer)
            one.version = times_written(one.tensor)


@final
class Rollback:
    """Undoes the changes of an update's passes, unless the update is applied.

    Attributes:
        buffers: of the model.
        is_unjudged: passes have begun, and neither commit nor roll-back has followed.
    """

    def __init__(
        self, model: nn.Module, context: TrainContext, buffers: Buffers, reducers: Reducers, trained: TrainedParameters
    ) -> None:
        self.buffers = buffers
        self._storage = context.storage
        self._reducers = reducers
        self._trained = trained
        self._parameters = named_parameters(model)
        self._tasks = [
            one
            for one in context.tasks.values()
            if type(one).state_dict is not Task.state_dict or isinstance(one, nn.Module)
        ]
        self._states: dict[int, list[dict[str, Any]]] = {}  # of tasks, before each update whose verdict is not known
        self._update = 0
        self._checks_left = _CHECKED
        self._written_before: list[tuple[str, Tensor, int]] = []  # tensors that passes must not write to
        self.is_unjudged = False

    def begin(self, update: int, batch: GlobalBatch) -> None:
        """Begin an update, perhaps again: changes that the user made to buffers since the last one stay."""
        self._update = update
        if self._checks_left:
            self._checks_left -= 1
            tensors = [("", one) for part in batch.microbatches for one in tensors_in(part.data)]
            every = [*tensors, *self._parameters.items()]
            self._written_before = [(name, one, _version_of(one)) for name, one in every]
        elif self._written_before:
            self._written_before = []
        self.buffers.restore(0.0)

    def begin_passes(self) -> Callable[[], None]:
        """Begin passes; gives the function that undoes a failed attempt."""
        self.is_unjudged = True
        if self._tasks and self._update not in self._states:
            self._states[self._update] = self._task_states()
        return partial(self._undo, self._storage.mark())

    def check_writes(self) -> None:
        """Raise TaskError where the passes of one of the first updates wrote to a parameter or to the batch."""
        for name, one, before in self._written_before:
            if _version_of(one) == before:
                continue
            if name:
                raise TaskError(
                    f"the forward of update {self._update} has written to the parameter `{name}`, which no roll-back "
                    f"restores. Compute with a changed copy, or change it once per update in `after_update`.",
                    field=name,
                )
            raise TaskError(
                f"the task has written into its batch in update {self._update}, so the update can't be done again. "
                f"Write into a copy (`x = x / 255` for `x.div_(255)`).",
                field="batch",
            )

    def judge(self, aborted: Tensor | float) -> None:
        """Roll back where `aborted` is 1, else keep the changes; a tensor decides on its device."""
        self.buffers.restore(aborted)
        self.is_unjudged = False
        if isinstance(aborted, Tensor):  # known after `settle`
            return
        if aborted:
            self._load_states(self._states.get(self._update, ()))
        self._states.pop(self._update, None)

    def settle(self, aborted: int | None) -> None:
        """All verdicts are known: restore the state of tasks before update `aborted`, the first that was aborted."""
        if self.is_unjudged:  # passes that have raised
            self.judge(1.0)
        if aborted is not None:
            self._load_states(self._states.get(aborted, ()))
        self._states.clear()

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
        self.check_writes()

    def _task_states(self) -> list[dict[str, Any]]:
        return [copied(task.state_dict()) for task in self._tasks]

    def _load_states(self, states: Sequence[dict[str, Any]]) -> None:
        for task, state in zip(self._tasks, states, strict=False):
            if state or task.state_dict():
                task.load_state_dict(copied(state))


def _version_of(tensor: Tensor) -> int:
    is_plain = not isinstance(tensor, nn.Parameter) or type(tensor.data) is Tensor
    return times_written(tensor) if is_plain and not tensor.is_inference() else 0
