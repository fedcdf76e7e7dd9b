"""Tensors of a model: their names in checkpoints, their order in memory, and numbers on their device.

Names leave out the wrappers of `torch.compile` and of activation checkpointing, so that a checkpoint fits a model with
and without them. Layouts matter to fused kernels, which pair the elements of a parameter and its gradient by their
place in memory. Numbers of the host are written by a kernel: a copy would wait for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError, CheckpointError

LEARNED = ("task_coefficients", "task_balance")
"""The parts of a model that hold what is learned about its tasks: by coefficients, and by what combines gradients."""

TASK_PARAMETERS = "task_parameters"
"""The part of a model that holds what its tasks train of their own."""

_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain(name: str) -> str:
    """A name as it would be if nothing were compiled.

    >>> plain("blocks.0._orig_mod.weight"), plain("_orig_mod.head.bias")
    ('blocks.0.weight', 'head.bias')
    """
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, "")
    return name


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters, each once, by plain name."""
    return {plain(name): parameter for name, parameter in model.named_parameters()}


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's buffers, each once, by plain name."""
    return {plain(name): buffer for name, buffer in model.named_buffers()}


def state_of(model: nn.Module) -> dict[str, Any]:
    """The model's `state_dict` by plain names."""
    return by_plain_name(model.state_dict())


def by_plain_name(values: Mapping[str, Any]) -> dict[str, Any]:
    return {plain(name): value for name, value in values.items()}


def load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `state_of` gave of a model that is compiled elsewhere, or not at all.

    What its own `state_dict` leaves out, such as a frozen part, stays as it is.

    Raises:
        CheckpointError: its `load_state_dict` does not know a name that its own `state_dict` gives.
    """
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
    """The number format in which a parameter's gradients are summed: mostly its own; float32 where that is left open.

    >>> gradient_format(torch.zeros(1, dtype=torch.float64))
    torch.float64
    """
    return parameter.grad_dtype or torch.float32


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` in the shape of `like`, and lying in memory as that does; a copy only where it lay otherwise.

    A stand-in that takes no memory (`expand`) says nothing of how it should lie.

    >>> laid_out(torch.arange(4.0), torch.zeros(2, 2).t()).stride()
    (1, 2)
    """
    shaped = tensor.view(like.shape)
    as_is = shaped.stride() == like.stride() or 0 in like.stride()
    return shaped if as_is else torch.empty_like(like, dtype=tensor.dtype).copy_(shaped)


def is_dense(tensor: Tensor) -> bool:
    """Whether its values lie in memory as they are: not sparse, quantised or nested.

    >>> is_dense(torch.eye(2)), is_dense(torch.eye(2).to_sparse())
    (True, False)
    """
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def shares_memory(tensor: Tensor) -> bool:
    """Whether elements of `tensor` are one memory, as after `expand`: torch writes into no such tensor.

    >>> shares_memory(torch.ones(1).expand(5)), shares_memory(torch.ones(1, 1).expand(1, 1))
    (True, False)
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in pairs)


def scalar_on(value: float | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`value` as a 0-dim tensor on `device`; no accelerator is waited for.

    Args:
        value: a number, or a tensor on the CPU or on `device`.
        dtype: of the result; None: that of the tensor, or torch's for such a number.

    >>> scalar_on(2, torch.device("cpu")), scalar_on(torch.tensor(2), torch.device("cpu"), torch.float64)
    (tensor(2), tensor(2., dtype=torch.float64))
    """
    if isinstance(value, Tensor):
        # what an accelerator still computes must be waited for; memory of the host is read before the call returns
        return value.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=dtype, device=device)


def device_here(device: str | torch.device) -> torch.device:
    """The device as its tensors have it: "cuda" is one of several by its number.

    Raises:
        ArgumentError: this machine has no such device.

    >>> device_here("cpu")
    device(type='cpu')
    """
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, ImportError) as error:  # torch asks for the package of some by an import
        why = str(error).splitlines()[0]
        raise ArgumentError(
            f"`device` must be 'auto', 'cpu' or an accelerator of this machine, but is '{device}': {why}",
            field="device",
        ) from error


def make_current(device: torch.device) -> None:
    if device.type == "cuda" and device != torch.device("cuda"):
        torch.cuda.set_device(device)
