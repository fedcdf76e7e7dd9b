"""Measures time and memory of each layer of a model on this machine.

The backward is timed as a whole and for the inputs alone; the difference is the time of the weights.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.internals import pytree
from evenstep.pipeline.boundary import tensors
from evenstep.pipeline.layers import Layers, arguments
from evenstep.tensors import gradient_format
from evenstep.tools.planning.balance import LayerCost


def measure(
    layers: Layers,
    inputs: Any,
    *,
    device: torch.device | None = None,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    convert: Callable[[nn.Module], object] = lambda module: None,
    repeats: int = 5,
) -> list[LayerCost]:
    """The cost of each layer for one micro-batch.

    Args:
        context: in which forwards run, such as a precision's.
        convert: gives a layer the number format that it computes in.
    """
    where = device or torch.device("cpu")
    values: list[Any] = []
    costs: list[LayerCost] = []
    for place, layer in enumerate(layers.layers):
        module = layer.build if isinstance(layer.build, nn.Module) else layer.build()
        module.to(where)
        convert(module)
        taken = [_fresh(values[source]) for source in layers.sources(place)]

        def forward(module: nn.Module = module, taken: list[Any] = taken, place: int = place) -> Any:
            with context():
                positional, named = arguments(taken, inputs, layers.inputs(place))
                return module(*positional, **named)

        cost, output = _measured(layer.name, module, taken, forward, where, repeats)
        costs.append(cost)
        values.append(_fresh(output))
    return costs


def _measured(
    name: str, module: nn.Module, taken: list[Any], forward: Callable[[], Any], device: torch.device, repeats: int
) -> tuple[LayerCost, Any]:
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    forward_s = _timed(forward, device, repeats)
    outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
    sources = [tensor for tensor in tensors(taken) if tensor.requires_grad]
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    seeds = [torch.ones_like(tensor) for tensor in outputs]

    def backward_s(wanted: list[Tensor]) -> float:
        if not outputs or not wanted:
            return 0.0
        return _timed(
            lambda: torch.autograd.grad(outputs, wanted, seeds, retain_graph=True, allow_unused=True), device, repeats
        )

    whole = backward_s([*sources, *weights])
    inputs_alone = min(backward_s(sources), whole) if weights else whole
    cost = LayerCost(
        name=name,
        forward_s=forward_s,
        input_backward_s=inputs_alone,
        weight_backward_s=whole - inputs_alone,
        activation_bytes=sum(saved.values()),
        output_bytes=sum(tensor.nbytes for tensor in tensors(output)),
        state_bytes=sum(
            parameter.nbytes + parameter.requires_grad * parameter.numel() * gradient_format(parameter).itemsize
            for parameter in module.parameters()
        ),
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
