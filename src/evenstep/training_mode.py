"""Training mode of a model whose frozen parts, such as norms, stay in evaluation mode.

Parts are frozen by their own `eval()`, or by a `train` method of the model, which a loop calls at its beginning.
"""

from collections.abc import Mapping

from torch import nn


def train(model: nn.Module) -> None:
    """Put `model` into training mode, except its parts that are in evaluation mode while the model is not."""
    if not model.training:
        model.train()
        return
    frozen = [part for part in model.modules() if not part.training]
    for part in [*model.modules()]:
        if part.training and _has_own(part):
            part.train()
    for part in frozen:
        part.training = False


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
