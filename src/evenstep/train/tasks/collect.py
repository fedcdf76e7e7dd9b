"""Losses collected from a model that computes them itself, by the names of its output or by their type.

Only what a pattern names, or what the model has marked as `Trained`, is trained on; a number that merely is called
something with "loss" is a metric. A task that computes its loss from the output needs none of this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast, final

from torch import Tensor

from evenstep.errors import ArgumentError, TaskError
from evenstep.train.tasks.task import Loss, Task


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """A loss that the model wants trained, among other outputs.

    Args:
        loss: over the batch, 0-dim, or None where there is none.
    """

    loss: Tensor | None


class Collected(Task):
    """Trains on losses among a model's outputs; those of other outputs that are single numbers become metrics.

    The output is a mapping, possibly of mappings, whose names are joined by "/".

    Args:
        keys: patterns of names, such as `("loss_*", "head/loss")`; without any, losses are the outputs of type
            `Trained`. A pattern must match from the name's beginning to its end, and cannot be open at both.
        averaged: whether the model gives means over the batch's units, which are then multiplied by its weight.

    Raises:
        ArgumentError: a pattern that would take everything with a word in it.

    >>> import torch
    >>> task = Collected(keys=("loss_*",))
    >>> output = {"loss_class": torch.tensor(2.0), "loss_box": None, "lossless_ratio": torch.tensor(9.0)}
    >>> task.loss(output, [torch.zeros(4)]).sum
    tensor(2.)
    """

    def __init__(self, *, keys: Sequence[str] = (), averaged: bool = False) -> None:
        for pattern in keys:
            if pattern.startswith("*") and pattern.endswith("*"):
                raise ArgumentError(
                    f"the pattern {pattern!r} takes metrics as well as losses; write how the names of losses begin or "
                    f"end, such as 'loss_*'."
                )
        self._keys = tuple(keys)
        self._averaged = averaged

    def loss(self, output: Any, batch: Any) -> Loss:
        """The sum of all losses found; none is a loss of None."""
        if not isinstance(output, Mapping):
            raise TaskError(
                f"{type(self).__name__} collects losses from a mapping of names, but the model gave a "
                f"{type(output).__name__}; let it give one, or write a task that computes the loss."
            )
        weight = float(self.weight(batch))
        found: dict[str, Tensor] = {}
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        for name, value in _flat(cast("Mapping[str, Any]", output)).items():
            trained = self._trained(name, value)
            if trained is not None:
                found[name] = trained.sum() * weight if self._averaged else trained.sum()
                metrics[name] = (found[name], weight)
            elif isinstance(value, Tensor) and value.ndim == 0:
                metrics[name] = (value * weight, weight)
        if list(found) == ["loss"]:
            del metrics["loss"]  # it is recorded as the loss of all
        total = None
        for one in found.values():
            total = one if total is None else total + one
        return Loss(total, metrics=metrics)

    def _trained(self, name: str, value: Any) -> Tensor | None:
        """The loss that this output is, if it is one."""
        if not self._keys:
            loss: Any = value.loss if isinstance(value, Trained) else None
        else:
            loss = value if any(fnmatchcase(name, pattern) for pattern in self._keys) else None
        if loss is not None and not isinstance(loss, Tensor):
            raise TaskError(
                f"the output `{name}` is a loss by its name, but is a {type(loss).__name__}; give a tensor."
            )
        return None if loss is None or loss.numel() == 0 else loss


def _flat(output: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in output.items():
        if isinstance(value, Mapping):
            flat.update(_flat(cast("Mapping[str, Any]", value), f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
