"""Puts a model into training mode, but for what is meant to stay in evaluation mode, such as frozen norms.

That is said in two ways: by `eval()` of single parts, or by a `train` of the model's own, which a loop is expected to
call at its beginning. Both hold.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from evenstep.errors import ArgumentError


def train(model: nn.Module) -> None:
    """Put `model` into training mode, all of it if it is in evaluation mode as a whole.

    Parts that are in evaluation mode by themselves stay there, and so does what a `train` of a part's own puts there.

    >>> class Net(nn.Sequential):
    ...     def train(self, mode=True):
    ...         super().train(mode)
    ...         self[1].eval()
    ...         return self
    >>> net = Net(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Dropout())
    >>> _ = net[2].eval()
    >>> train(net); net.training, net[1].training, net[2].training
    (True, False, False)
    """
    if not model.training:
        model.train()
        return
    frozen = [part for part in model.modules() if not part.training]
    for part in [*model.modules()]:
        if part.training and _has_own(part):
            part.train()
    for part in frozen:
        part.training = False


def require_gradients(done: str) -> None:
    """Raise ArgumentError where something is `done` in `torch.inference_mode()`, which `enable_grad` can't end."""
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{done} inside `torch.inference_mode()`, in which no gradient can be taken, nor a tensor made that an "
            f"update may change; do it outside of that."
        )


def require_own_format(
    method: str, device: torch.device, forward: Callable[[torch.device], AbstractContextManager[Any]]
) -> None:
    """Raise ArgumentError where `method` was called inside a `torch.autocast` of the caller's, which would hold on.

    Args:
        forward: gives in what its forwards run; an autocast takes the place of the caller's.
    """
    if torch.is_autocast_enabled(device.type) and not isinstance(forward(device), torch.autocast):
        given = torch.get_autocast_dtype(device.type)
        name = {torch.bfloat16: "'bf16-mixed'", torch.float16: "'16-mixed'"}.get(given, "…")
        raise ArgumentError(
            f"`{method}` was called inside `torch.autocast`, under which forwards would compute in "
            f"{str(given).removeprefix('torch.')}, and not in what `precision` says; call it outside of that, and give "
            f"`precision={name}` if it is meant.",
            field=method,
        )


def is_own(model: nn.Module) -> bool:
    return any(map(_has_own, model.modules()))


def _has_own(part: nn.Module) -> bool:
    return type(part).train is not nn.Module.train


def put_back(modes: Mapping[nn.Module, bool]) -> None:
    """Put modules back into the modes that they had, by a `train` of their own where they have one.

    Such a one may do more than note the mode: layers that merge their adapters for an evaluation take them apart again.
    """
    for part, training in modes.items():
        if _has_own(part):
            part.train(training)
    for part, training in modes.items():
        part.training = training
