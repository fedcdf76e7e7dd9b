"""What the passes of an update leave behind: gradients, metrics, moved buffers, and what tasks remember of them.

Nothing of it is kept unless the update is applied: where it is aborted, or a try of it breaks off, all is put back. A
batch that a task has written into can't be, so nothing is computed from such a one again.
"""

from collections.abc import Callable
from functools import partial
from typing import final

from torch import Tensor

from evenstep.data import Position
from evenstep.errors import TaskError
from evenstep.train.buffers import Buffers
from evenstep.train.tasks.tasks import StatesOfTasks
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution


@final
class PassEffects:
    """What the passes of an update leave behind.

    Attributes:
        buffers: of the model.
    """

    def __init__(
        self,
        buffers: Buffers,
        context: TrainContext,
        execution: Execution,
        trained: TrainedParameters,
        begins: Callable[[int], None],
    ) -> None:
        self.buffers = buffers
        self._context, self._execution, self._trained, self._begins = context, execution, trained, begins
        self._states = StatesOfTasks(context.tasks.values())
        self._begun: tuple[int, Position] | None = None  # the update that was begun last, and its batch
        self._is_unjudged = False  # whether passes have begun, and nobody has said yet whether what they do stays

    def begin(self, update: int, position: Position) -> None:
        """An update begins, perhaps once more: whatever the user did to buffers since the last one stays."""
        if self._begun != (update, position):
            self._begun, self._context.lent.spoiled = (update, position), None
        self._begins(update)
        self.follow()

    def follow(self) -> None:
        """Take buffers as they are now."""
        if self.buffers.exist:
            self.buffers.begin()

    def begin_passes(self) -> Callable[[], None]:
        """Passes begin; gives what undoes a try of them that has failed.

        Raises:
            TaskError: they would begin with a batch that a task has written into.
        """
        self._check_unspoilt()
        self._is_unjudged = True
        self._states.begin(0 if self._begun is None else self._begun[0])
        return partial(self._undo, self._context.storage.mark())

    def judge(self, aborted: Tensor | float) -> None:
        """Take back what passes did where `aborted` is 1, else keep it; of a tensor only its device knows."""
        self.buffers.restore(aborted)
        self._is_unjudged = False
        if not isinstance(aborted, Tensor):  # else nobody knows before `settle`
            if aborted:
                self._states.put_back()
            self._states.keep()

    def settle(self, aborted: int | None) -> None:
        """The device has told its verdicts: take back what tasks remember of updates from number `aborted` on."""
        self._states.settle(aborted)

    def take_back(self) -> None:
        """Take back what passes did that nobody has judged: what came later, such as hooks' changes, stays."""
        if self._is_unjudged:
            self.judge(1.0)

    def forget_gradients(self) -> None:
        """Begin to sum up gradients, perhaps anew."""
        for parameter in self._trained.with_grad:
            parameter.grad = None
        self._execution.begin()

    def _undo(self, mark: tuple[int, int]) -> None:
        self._context.storage.drop_after(mark)
        self.forget_gradients()
        self.buffers.restore(1.0)
        self._states.put_back()
        self._check_unspoilt()

    def _check_unspoilt(self) -> None:
        if (name := self._context.lent.spoiled) is not None:
            raise TaskError(
                f"the update must be done again, but {type(self._context.tasks[name]).__name__} has written into the "
                f"batch that it was given, which nobody had seen before. Let the task write into a copy of its own "
                f"(`x = x / 255` for `x.div_(255)`), or leave `check_loss` on: where batches can be cut in two it is "
                f"seen in time, and copies are made."
            )
