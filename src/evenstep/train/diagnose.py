"""Names where a non-finite gradient came from.

The failed update is run once more, with the same randomness and the same parameters (nothing of it was applied), and
every module's output is looked at. It is slow and runs only before a run stops.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.names import named_parameters


def diagnose(model: nn.Module, rerun: Callable[[], object], *, if_finite: str = "") -> str:
    """Run `rerun` and say which module, or else which parameters' gradients, first were inf or NaN.

    Args:
        model: whose modules are watched.
        rerun: runs the forwards and backwards of the failed update, leaving gradients in `.grad`.
        if_finite: what to say if all numbers are finite this time, where there is a reason for that.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> _ = model[0].weight.data.fill_(float("nan"))
    >>> diagnose(model, lambda: model(torch.ones(1, 1)).sum().backward())
    'the output of module `0` (Linear) is not finite'
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not all(_finite(tensor) for tensor in _tensors(output)):
                place = f"module `{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
                found.append(f"the output of {place} is not finite")

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        rerun()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    bad = [name for name, p in named_parameters(model).items() if p.grad is not None and not _finite(p.grad)]
    if not bad:
        different = "running the update again gave finite numbers: the model or its task computes differently each time"
        return if_finite or different
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"all outputs are finite, but the gradients of {', '.join(bad[:3])}{more} are not: look at the loss"


def _finite(tensor: Tensor) -> bool:
    values = cast("Any", tensor)._values() if tensor.is_sparse else getattr(tensor, "_local_tensor", tensor)
    # -inf is what masks are made of; what it does harm to shows up behind it.
    return not bool((values.isnan() | (values == torch.inf)).any())


def _tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item] if item.is_floating_point() else []
    if isinstance(item, dict):
        item = list(cast("dict[Any, Any]", item).values())
    if isinstance(item, tuple | list):
        return [tensor for part in cast("list[Any]", item) for tensor in _tensors(part)]
    return []
