"""Bytes that a rank keeps in memory for the parameters: from update to update, and gradients at their sum.

Activations are not counted, nor the temporary memory of reductions.
"""

from collections.abc import Iterable

from torch import Tensor

from evenstep.internals import local_tensor
from evenstep.optim.low_bit import inner_tensors
from evenstep.parallel import mapped
from evenstep.tensors import gradient_format, named_parameters
from evenstep.train.engine import Engine


def footprint(engine: Engine) -> dict[str, int]:
    """Bytes on this rank by use; "blocks" are the most partial sums of gradients in the last update."""
    state = engine.parts.saved
    parameters, formats = named_parameters(state.model), state.averaged_as
    trained = [one for one in parameters.values() if one.requires_grad]
    held = [one.numel() if state.layout.exact else local_tensor(one).numel() for one in trained]  # whole until summed
    gradients = sum(count * gradient_format(one).itemsize for count, one in zip(held, trained, strict=True))
    moments: list[Tensor] = []
    for of_parameter in state.optimizer.state.values():  # counts of steps are 0-dim
        mapped(dict(of_parameter), lambda one: moments.extend(inner_tensors(one)) if one.ndim else None)
    return {
        "model": _bytes(one for name, one in parameters.items() if name not in formats),
        "masters": _bytes([*state.stepper.masters.values(), *(parameters[name] for name in formats)]),
        "gradients": gradients,
        "blocks": gradients * engine.reducers.further_sets,
        "optimizer": _bytes(moments),
        "average": 0 if state.average is None else _bytes(state.average.state_dict()[name] for name in parameters),
    }


def per_parameter(held: dict[str, int], parameters: int) -> str:
    """Bytes per parameter, as one line."""
    parts = {name: value / max(parameters, 1) for name, value in held.items() if value}
    each = ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
    return f"{sum(parts.values()):.3g} bytes per parameter: {each}"


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local.numel() * local.itemsize for local in map(local_tensor, tensors))
