"""The weight that a task gives a batch, checked: a finite number of at least 0."""

from evenstep.errors import TaskError
from evenstep.train.tasks.task import Task, default_weight

_LARGEST = 1e300  # the sum over an update is finite too


def weight_of(task: Task, data: object, what: str | int, num_samples: int | None = None) -> float:
    """The weight that `task` gives a batch.

    Args:
        what: what messages call the batch, or the number of the micro-batch that it is.
        num_samples: how many samples were put into it, where that is known.

    Raises:
        TaskError: it is negative, not finite, or not a number.
    """
    by_default = getattr(task.weight, "__func__", None) is Task.weight
    given = default_weight(task, data, num_samples) if by_default else task.weight(data)
    try:
        weight = float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give a number or a 0-dim tensor, but gave {type(given).__name__} for "
            f"{_called(what)}: {error}"
        ) from error
    if not 0 <= weight <= _LARGEST:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give a finite number of at least 0, and at most {_LARGEST:g}, but "
            f"gave {weight} for {_called(what)}; it is the number of units that the summed loss covers."
        )
    return weight


def _called(what: str | int) -> str:
    return what if isinstance(what, str) else f"micro-batch {what}"
