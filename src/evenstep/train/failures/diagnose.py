"""Names where a non-finite gradient came from.

The failed update is run once more, with the same randomness and the same parameters (nothing of it was applied), and
every module's output is looked at, and every gradient on its way back. It is slow and runs only before a run stops.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.internals import local_tensor
from evenstep.names import named_parameters
from evenstep.optim.apply import norms
from evenstep.parallel import Group
from evenstep.pipeline.compiled import as_written
from evenstep.train.failures.backwards import Backwards, is_finite, tensors_in


def diagnose(model: nn.Module, rerun: Callable[[], object], *, if_finite: str = "") -> str:
    """Run `rerun` and say which module's output, or else whose backward's gradient, first was inf or NaN.

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
            if not found and not all(_finite(tensor) for tensor in tensors_in(output)):
                place = f"module `{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
                found.append(f"the output of {place} is not finite")

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    backwards = Backwards(model=model)
    try:
        with as_written(), backwards.watched():
            rerun()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    bad = [name for name, p in named_parameters(model).items() if p.grad is not None and not is_finite(p.grad)]
    if not bad:
        squared = sum(_norm(p.grad) ** 2 for p in model.parameters() if p.grad is not None)
        if squared > torch.finfo(torch.float32).max:
            return (
                f"all numbers are finite, but the square of the gradient's norm, {math.sqrt(squared):.3g}, "
                "is not in float32: training has diverged"
            )
        different = "running the update again gave finite numbers: the model or its task computes differently each time"
        return if_finite or different
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    origin = backwards.first() or "look at the loss"
    return f"all outputs are finite, but the gradients of {', '.join(bad[:3])}{more} are not: {origin}"


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
    """‖g‖₂ of this rank's part of a gradient, so wide that it does not overflow."""
    values = local_tensor(grad.coalesce().values() if grad.is_sparse else grad)
    return float(norms([values], torch.float64 if values.device.type != "mps" else torch.float32))


def _finite(tensor: Tensor) -> bool:
    values = local_tensor(tensor)
    # -inf is what masks are made of; what it does harm to shows up behind it.
    return not bool((values.isnan() | (values == torch.inf)).any())
