"""Evaluation mode for a while, of a model and of the networks that tasks hold."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import nn

from evenstep import training_mode
from evenstep.data.seeding import undisturbed


@contextmanager
def evaluating(model: nn.Module, device: torch.device, tasks: Iterable[object] = ()) -> Generator[None]:
    """Evaluation mode without gradients; modes and random generators are restored afterwards.

    Args:
        tasks: their own networks are in evaluation mode as well.
    """
    values = [value for task in tasks for value in (task, *getattr(task, "__dict__", {}).values())]
    models = [*(value for value in values if isinstance(value, nn.Module)), model]
    modes = {part: part.training for one in models for part in one.modules()}
    for one in models:
        one.eval()
    try:
        with torch.no_grad(), undisturbed(device):
            yield
    finally:
        training_mode.put_back(modes)
