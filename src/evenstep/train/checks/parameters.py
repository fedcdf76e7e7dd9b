"""Checks the parameters that a trainer is given, before anything is changed: each can be trained, once, by this run.

What becomes of them while the run goes on is `trained`'s to watch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.precision import Precision
from evenstep.train.state.train_state import parameter_names, unwrapped


def check_parameters(model: nn.Module, optimizer: Optimizer, precision: Precision) -> None:
    """Raise ArgumentError for parameters that can't be trained as they are; the message names the first.

    Args:
        model: not yet moved or wrapped.
        precision: of the run, which says what formats it trains.
    """
    by_name = dict(unwrapped(model).named_parameters())
    _check_whole(by_name | dict(unwrapped(model).named_buffers()))
    names = parameter_names(model, optimizer)
    _check_once(names, model)
    _check_dense(names, optimizer, by_name)
    held = {name for group in names for name in group}
    precision.check_trained({name: one for name, one in by_name.items() if one.requires_grad and name in held})


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise ArgumentError(
                f"`{name}` of the model is a DTensor: it is cut over ranks, or copied on them, by something else "
                f"(tensor parallelism, `fully_shard`, another trainer), so norms, sums and checkpoints would be of a "
                f"part of it. Give the trainer the whole model as it is built on one process, and let its `strategy` "
                f"share it: `Fsdp` or `OrderedFsdp` for shards, `PipelineModel` for models that don't fit one device."
            )


def _check_dense(names: list[list[str]], optimizer: Optimizer, by_name: Mapping[str, Tensor]) -> None:
    """Raise ArgumentError for a part of a larger tensor where a kernel would step all that lies in between as well."""
    for number, (own, group) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        for name in own if group.get("fused") else ():
            if (one := by_name.get(name)) is not None and torch.empty_like(one).stride() != one.stride():
                raise ArgumentError(
                    f"`{name}` is a part of a larger tensor (of strides {one.stride()} for shape {tuple(one.shape)}), "
                    f"and torch's fused optimizers step what lies between its elements in their place; make it from "
                    f"`tensor.clone()`, or leave `fused` out of group {number} of the optimizer."
                )


def _check_once(names: list[list[str]], model: nn.Module) -> None:
    """Raise ArgumentError for a parameter that would be stepped twice."""
    places: dict[str, int] = {}
    for number, group in enumerate(names):
        for name in group:
            if name in places:
                same = {id(one): key for key, one in unwrapped(model).named_parameters()}
                every = unwrapped(model).named_parameters(remove_duplicate=False)
                others = [key for key, one in every if same.get(id(one)) == name and key != name]
                tied = f", which is tied to `{others[0]}`," if others else ""
                raise ArgumentError(
                    f"`{name}`{tied} is in the optimizer twice, in group {places[name]} and in group {number}, so it "
                    f"would be stepped twice in each update; give each parameter once, as `model.parameters()` does."
                )
            places[name] = number
