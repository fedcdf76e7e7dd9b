"""Checks what a trainer is given, before anything is changed or run.

Each check raises with what was, what must be and what to do. Whether the parts fit each other shows in the first
update; whether they can at all shows here.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.errors import ArgumentError, ReplicaError, TaskError
from evenstep.parallel import Group, device_of_rank


def choose_device(device: str | torch.device) -> torch.device:
    """The device by name; "auto" is the accelerator if there is one, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return device_of_rank("auto")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"`device` must be 'auto', 'cpu' or an accelerator of this machine, but is '{device}': "
            f"{str(error).splitlines()[0]}"
        ) from error
    return chosen


def check_counts(
    *,
    updates: int | None,
    epochs: int | None,
    log_every_updates: int,
    settle_every_updates: int | None,
    keep_checkpoints: int | None,
    keep_every_updates: int | None,
    clip_norm: Any,
) -> None:
    """Raise ArgumentError for a number out of its range, or a run without an end."""
    if (updates is None) == (epochs is None):
        given = "neither is" if updates is None else "both are"
        raise ArgumentError(f"give either `updates` or `epochs`, which says when the run is done; {given} given.")
    counts = {
        "updates": updates,
        "epochs": epochs,
        "log_every_updates": log_every_updates,
        "settle_every_updates": settle_every_updates,
        "keep_checkpoints": keep_checkpoints,
        "keep_every_updates": keep_every_updates,
    }
    for name, count in counts.items():
        least = 0 if name == "keep_checkpoints" else 1
        if count is not None and (type(count) is not int or count < least):
            raise ArgumentError(f"`{name}` must be a whole number of at least {least}, but is {count!r}.")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and 0 < clip_norm < math.inf):
        raise ArgumentError(f"`clip_norm` must be finite and above 0, but is {clip_norm!r}; None does not clip.")


def check_keeping(data: Data, *, folder: object, keep_checkpoints: int | None, rewinds: bool) -> None:
    """Raise ArgumentError for a policy that has nothing to go back to, or checkpoints that can't be gone on from."""
    keeps = folder is not None and keep_checkpoints != 0
    if rewinds and not keeps:
        raise ArgumentError(
            "a policy that goes back to a checkpoint needs checkpoints, but this run keeps none; give it a `folder` "
            "and let it keep some, or choose a policy that stops or skips."
        )
    if keeps and not data.resumable:
        raise ArgumentError(
            "a run with a `folder` saves checkpoints, but this stream cannot say where it is, so none could be "
            "resumed; give the stream `state_dict` and `load_state_dict`, or save none with `keep_checkpoints=0`."
        )


def check_same_on_all_ranks(group: Group, described: dict[str, object]) -> None:
    """Raise ReplicaError unless all ranks describe the same run; the message names rank and what differs."""
    everybody = group.gather(described)
    for rank, theirs in enumerate(everybody):
        for name, value in everybody[0].items():
            if theirs[name] != value:
                raise ReplicaError(
                    f"all ranks must train the same run, but `{name}` is {_short(theirs[name])} on rank {rank} and "
                    f"{_short(value)} on rank 0; give all ranks the same files, versions and settings."
                )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def check_model(model: nn.Module) -> None:
    """Raise TaskError unless the model has something to train, all of it on one device."""
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        what = f"all of its {len(parameters)} parameters are frozen" if parameters else "it has no parameters"
        raise TaskError(
            f"the model ({type(model).__name__}) has nothing to train: {what}; set `requires_grad` on those to train."
        )
    devices = {str(parameter.device) for parameter in parameters}
    if len(devices) > 1:
        raise TaskError(
            f"all parameters of the model must be on one device, but they are on {', '.join(sorted(devices))}; move "
            f"the model to one of them."
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ArgumentError for an optimizer that can't take a step from one gradient."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "`optimizer` must take its step from one gradient, but LBFGS evaluates the loss several times per step; "
            "use any other optimizer of torch.optim."
        )
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        raise TaskError("the optimizer has nothing to train: none of its parameters has `requires_grad`.")
