"""Tensors of a model: names in checkpoints, order in memory, and numbers on their device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError, CheckpointError
from evenstep.internals import local_tensor

LEARNED = ("task_coefficients", "task_balance")
"""Parts of a model with learned coefficients of tasks and with the state of methods that combine gradients."""

TASK_PARAMETERS = "task_parameters"
"""Part of a model with the modules of tasks."""

# by `torch.compile`, torch's activation checkpointing, and FullyShardedDataParallel
_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain(name: str) -> str:
    """Name of a tensor without the wrappers of `torch.compile`, activation checkpointing and FSDP."""
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, "")
    return name


def by_plain_name(values: Mapping[str, Any]) -> dict[str, Any]:
    return {plain(name): value for name, value in values.items()}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a model, each once, by plain name."""
    return by_plain_name(dict(model.named_parameters()))


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of a model, each once, by plain name."""
    return by_plain_name(dict(model.named_buffers()))


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of a model by plain names, so that it fits the model compiled and not."""
    return by_plain_name(model.state_dict())


def load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of `state_of`. Tensors that the model's `state_dict` leaves out stay as they are."""
    given = {name: state[plain(name)] for name in model.state_dict()}
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        model.load_state_dict(given)
        return
    unknown = model.load_state_dict(given, strict=False).unexpected_keys
    if unknown:
        raise CheckpointError(
            f"the model's `state_dict` gives `{unknown[0]}`, which its `load_state_dict` does not know; let both have "
            f"the same names."
        )


def gradient_format(parameter: Tensor) -> torch.dtype:
    """Number format in which the gradients of a parameter are summed; float32 if torch leaves it open."""
    return parameter.grad_dtype or torch.float32


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` with the shape and the strides of `like`; a copy only if its strides differ.

    torch's fused optimizers pair elements of a parameter and of its gradient by their place in memory, and gradients
    come from other ranks row by row. Tensors of `expand` say nothing about strides.
    """
    shaped = tensor.view(like.shape)
    if shaped.stride() == like.stride() or 0 in like.stride():
        return shaped
    return torch.empty_like(like, dtype=tensor.dtype).copy_(shaped)


def is_dense(tensor: Tensor) -> bool:
    """True for a tensor that is neither sparse nor quantised nor nested."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def scalar_on(value: float | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`value` as a 0-dim tensor on `device`, without waiting for an accelerator: a kernel writes the number."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=dtype, device=device)


def device_here(device: str | torch.device) -> torch.device:
    """Device of this machine with its number, such as "cuda:0" for "cuda"; ArgumentError if there is none."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, ImportError) as error:
        why = str(error).splitlines()[0]
        raise ArgumentError(
            f"`device` must be 'auto', 'cpu' or an accelerator of this machine, but is '{device}': {why}",
            field="device",
        ) from error


def make_current(device: torch.device) -> None:
    """Make an accelerator torch's current one: streams, events and other libraries use that one."""
    if device.type == "cuda" and device != torch.device("cuda"):
        torch.cuda.set_device(device)


_COLUMNS = 1021  # words are summed in so many columns, so that their order counts


def byte_sum(tensor: Tensor) -> Tensor:
    """Number that changes with each single bit of a tensor, or of its shard; int64, 0-dim.

    It is Σ w·(2c + 1) mod 2⁶⁴ over the words w of 8 bytes in memory and their columns c. Weights are odd: an even one
    would lose the highest bit, which is the sign of a float.
    """
    flat = local_tensor(tensor).detach().contiguous().flatten()
    if flat.data_ptr() % 8:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    body = data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    rest = torch.zeros(8 * _COLUMNS, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - body] = data[body:]
    columns = rest.view(torch.int64)
    if body:
        columns = columns + data[:body].view(torch.int64).view(-1, _COLUMNS).sum(0)
    return (columns * torch.arange(1, 2 * _COLUMNS, 2, device=data.device)).sum()
