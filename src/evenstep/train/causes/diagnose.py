"""Names the module where numbers first were inf or NaN.

The failed update runs once more, with the same randomness and the same parameters, and the output of each module is
looked at. Gradients that are not finite behind finite outputs are left to `torch.autograd.detect_anomaly`. It is slow,
and runs only before a run stops.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.arguments import first_of
from evenstep.internals import local_tensor
from evenstep.optim.apply import norms
from evenstep.parallel import Group
from evenstep.pipeline.compiled import as_written
from evenstep.tensors import named_parameters


def diagnose(model: nn.Module, rerun: Callable[[], object], *, if_finite: str = "") -> str:
    """Run `rerun` and name the first module whose output is inf or NaN, or else the parameters with such gradients.

    Args:
        rerun: runs the forwards and backwards of the failed update, leaving gradients in `.grad`.
        if_finite: why all numbers may be finite this time; "" where there is no reason.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> _ = model[0].weight.data.fill_(float("nan"))
    >>> diagnose(model, lambda: model(torch.ones(1, 1)).sum().backward())
    'the output of module `0` (Linear) is not finite'
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not all(_finite(tensor) for tensor in _tensors_in(output)):
                place = f"module `{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
                found.append(f"the output of {place} is not finite")

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with as_written():
            rerun()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    gradients = {name: one.grad for name, one in named_parameters(model).items() if one.grad is not None}
    bad = [name for name, gradient in gradients.items() if not _is_finite(gradient)]
    if bad:
        return (
            f"all outputs are finite, but the gradients of {first_of(bad, 3)} are not: look at the loss, and train "
            f"under `torch.autograd.detect_anomaly()` to see the line"
        )
    squared = sum(_norm(gradient) ** 2 for gradient in gradients.values())
    if squared > torch.finfo(torch.float32).max:
        return f"all numbers are finite, but the gradient's norm is {math.sqrt(squared):.3g}: training has diverged"
    return if_finite or "all numbers are finite: the model or its task computes differently each time"


def gradient_norms(model: nn.Module, group: Group) -> dict[str, float | str]:
    """‖g‖₂ of each parameter's gradient, over all ranks, which ask together; "inf" and "nan" as words, as JSON wants.

    >>> model = nn.Linear(2, 1)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> gradient_norms(model, Group())
    {'weight': 5.0}
    """
    mine: dict[tuple[str, int], float] = {}
    for name, parameter in named_parameters(model).items():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            place = grad.device_mesh.get_local_rank() if hasattr(grad, "device_mesh") else 0
            mine[name, place] = _norm(grad)
    squares: dict[str, float] = {}
    # copies of one shard are equal, so each place counts once
    for (name, _), norm in {place: norm for theirs in group.gather(mine) for place, norm in theirs.items()}.items():
        squares[name] = squares.get(name, 0.0) + norm * norm
    whole = {name: math.sqrt(square) for name, square in squares.items()}
    return {name: norm if math.isfinite(norm) else str(norm) for name, norm in whole.items()}


def _norm(grad: Tensor) -> float:
    values = local_tensor(grad.coalesce().values() if grad.is_sparse else grad)
    return float(norms([values], torch.float64 if values.device.type != "mps" else torch.float32))


def _finite(tensor: Tensor) -> bool:
    values = local_tensor(tensor)
    # -inf is what masks are made of; what it does harm to shows up behind it.
    return not bool((values.isnan() | (values == torch.inf)).any())


def _is_finite(tensor: Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else local_tensor(tensor)
    return bool(values.isfinite().all())


def _tensors_in(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item] if item.is_floating_point() or item.is_complex() else []
    if isinstance(item, dict):
        item = list(cast("dict[Any, Any]", item).values())
    if isinstance(item, tuple | list):
        return [tensor for part in cast("list[Any]", item) for tensor in _tensors_in(part)]
    return []
