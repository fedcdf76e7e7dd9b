"""Training mode of a model whose frozen parts, such as norms, stay in evaluation mode.

Parts are frozen by their own `eval()`, or by a `train` method of the model, which a loop calls at its beginning.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from evenstep.errors import ArgumentError


def train(model: nn.Module) -> None:
    """Put `model` into training mode, except its parts that are in evaluation mode while the model is not.

    Parts that their own `train` method puts into evaluation mode stay there, too.

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
    """Raise ArgumentError in `torch.inference_mode()`.

    Args:
        done: beginning of the sentence, such as "`update` was called".
    """
    if torch.is_inference_mode_enabled():
        raise ArgumentError(f"{done} inside `torch.inference_mode()`, which has no gradients; do it outside of that.")


def require_own_format(
    method: str, device: torch.device, forward: Callable[[torch.device], AbstractContextManager[Any]]
) -> None:
    """Raise ArgumentError if `method` was called inside `torch.autocast`, unless its forwards have an autocast too.

    Args:
        forward: gives the context of a forward.
    """
    if torch.is_autocast_enabled(device.type) and not isinstance(forward(device), torch.autocast):
        given = torch.get_autocast_dtype(device.type)
        name = {torch.bfloat16: "'bf16-mixed'", torch.float16: "'16-mixed'"}.get(given, "…")
        raise ArgumentError(
            f"`{method}` was called inside `torch.autocast`, which replaces `precision`; call it outside of that, with "
            f"`precision={name}` for {str(given).removeprefix('torch.')}.",
            field=method,
        )


def is_own(model: nn.Module) -> bool:
    return any(map(_has_own, model.modules()))


def _has_own(part: nn.Module) -> bool:
    return type(part).train is not nn.Module.train


def put_back(modes: Mapping[nn.Module, bool]) -> None:
    """Restore the modes of modules; their own `train` methods, which may merge adapters, are called."""
    for part, training in modes.items():
        if _has_own(part):
            part.train(training)
    for part, training in modes.items():
        part.training = training
