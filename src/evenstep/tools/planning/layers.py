"""Costs of a model's layers, measured on this machine, and their division into stages."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import PlanError
from evenstep.internals import pytree
from evenstep.pipeline.layers import Layers, arguments
from evenstep.pipeline.wire import tensors
from evenstep.precision import FullPrecision, Precision
from evenstep.tensors import gradient_format
from evenstep.tools.planning.simulate import Cost


def balance(seconds: Sequence[float], stages: int) -> tuple[range, ...]:
    """Places of each stage's layers, such that the slowest stage is as fast as possible, by dynamic programming.

    >>> balance([3, 1, 1, 1, 2], 3)
    (range(0, 1), range(1, 3), range(3, 5))
    """
    count = len(seconds)
    if stages > count:
        raise PlanError(f"{count} layers can't be cut into {stages} stages; give each stage one layer at least.")
    until = [0, *accumulate(seconds)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the number of layers: slowest stage, begins
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(slowest, until[end] - until[begin]), (*begins, begin))
                for begin, (slowest, begins) in best.items()
                if begin < end
            )
            for end in range(stage, count + 1)
        }
    return tuple(range(begin, end) for begin, end in pairwise((*best[count][1], count)))


def measure(
    layers: Layers,
    inputs: Any,
    *,
    device: torch.device,
    precision: Precision = FullPrecision(),  # noqa: B008 - frozen
    repeats: int = 5,
) -> list[Cost]:
    """Measure the cost of each layer for one micro-batch.

    The backward is timed as a whole and for the inputs alone; the difference is the time of the weights.
    """
    values: list[Any] = []
    costs: list[Cost] = []
    for place, layer in enumerate(layers.layers):
        module = layer.build if isinstance(layer.build, nn.Module) else layer.build()
        module.to(device)
        precision.convert(module, ())
        taken = [_fresh(values[source]) for source in layers.sources(place)]
        positional, named = arguments(taken, inputs, layers.inputs(place))

        def forward(module: nn.Module = module, positional: Any = positional, named: Any = named) -> Any:
            with precision.forward(device):
                return module(*positional, **named)

        cost, output = _measured(module, taken, forward, device, repeats)
        costs.append(cost)
        values.append(_fresh(output))
    return costs


def _measured(
    module: nn.Module, taken: list[Any], forward: Callable[[], Any], device: torch.device, repeats: int
) -> tuple[Cost, Any]:
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
    seeds = [torch.ones_like(tensor) for tensor in outputs]
    sources = [tensor for tensor in tensors(taken) if tensor.requires_grad]
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def backward_s(wanted: list[Tensor]) -> float:
        run = partial(torch.autograd.grad, outputs, wanted, seeds, retain_graph=True, allow_unused=True)
        return _timed(run, device, repeats) if outputs and wanted else 0.0

    whole = backward_s([*sources, *weights])
    inputs_alone = min(backward_s(sources), whole) if weights else whole
    gradients = sum(one.numel() * gradient_format(one).itemsize for one in weights)
    cost = Cost(
        forward_s=_timed(forward, device, repeats),
        input_backward_s=inputs_alone,
        weight_backward_s=whole - inputs_alone,
        activation_bytes=sum(saved.values()),
        state_bytes=gradients + sum(parameter.nbytes for parameter in module.parameters()),
    )
    return cost, output


def _timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        begin = perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(perf_counter() - begin)
    return median(times[1:])  # the first one warms up


def _fresh(tree: Any) -> Any:
    def leaf(value: Any) -> Any:
        return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value

    return pytree.tree_map(leaf, tree)
