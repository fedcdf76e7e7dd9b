"""The names of a model's tensors as checkpoints have them: without what torch's wrappers put in between.

A module that `torch.compile` gives is wrapped, and what it was compiled from is its part `_orig_mod`; torch's wrapper
for activation checkpointing does alike. Whether a model, or some parts of it, are compiled or checkpointed must not
show in a name, so that a checkpoint fits both. What an optimizer holds has no names, only an order. It changes no
module.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evenstep.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

LEARNED = ("task_coefficients", "task_balance")
"""The parts of a model that hold what is learned about its tasks: by coefficients, and by what combines gradients."""

TASK_PARAMETERS = "task_parameters"
"""The part of a model that holds what its tasks train of their own."""

_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain(name: str) -> str:
    """A name as it would be if nothing were compiled.

    >>> plain("blocks.0._orig_mod.weight"), plain("_orig_mod.head.bias")
    ('blocks.0.weight', 'head.bias')
    """
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, "")
    return name


def named_parameters(model: "nn.Module") -> "dict[str, nn.Parameter]":
    """The model's parameters, each once, by plain name."""
    return {plain(name): parameter for name, parameter in model.named_parameters()}


def parameters_in(optimizer: "Optimizer") -> "list[nn.Parameter]":
    """The parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_buffers(model: "nn.Module") -> "dict[str, Tensor]":
    """The model's buffers, each once, by plain name."""
    return {plain(name): buffer for name, buffer in model.named_buffers()}


def state_of(model: "nn.Module") -> dict[str, Any]:
    """The model's `state_dict` by plain names."""
    return by_plain_name(model.state_dict())


def by_plain_name(values: Mapping[str, Any]) -> dict[str, Any]:
    return {plain(name): value for name, value in values.items()}


def load_state(model: "nn.Module", state: Mapping[str, Any]) -> None:
    """Load what `state_of` gave of a model that is compiled elsewhere, or not at all.

    What its own `state_dict` leaves out, such as a frozen part, stays as it is.

    Raises:
        CheckpointError: its `load_state_dict` does not know a name that its own `state_dict` gives.
    """
    from torch.nn import Module

    given = {name: state[plain(name)] for name in model.state_dict()}
    if type(model).load_state_dict is not Module.load_state_dict:
        model.load_state_dict(given)
        return
    unknown = model.load_state_dict(given, strict=False).unexpected_keys
    if unknown:
        raise CheckpointError(
            f"the model's `state_dict` gives `{unknown[0]}`, which its `load_state_dict` does not know; let both have "
            f"the same names."
        )
