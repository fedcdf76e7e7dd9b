"""Tries a model on some tokens, before anything is trained: what it does with them is seen, not looked up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evenstep.train.evaluating import evaluating

T = TypeVar("T")
_TOKENS = 8


def tried(model: nn.Module, act: Callable[[Tensor, Tensor], T]) -> T | None:
    """What `act(tokens, weight)` gives, with the model in evaluation mode and without a trace.

    None where it has no embeddings of tokens, or where `act` fails: the model may need more than tokens (images, masks,
    …), of which nothing is known here.

    Args:
        act: is given tokens `[length]` and the weight of their embeddings.
    """
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    try:
        found: object = None if embeddings is None else embeddings()
    except NotImplementedError:  # as models of images answer
        return None
    if not isinstance(found, nn.Embedding):
        return None
    tokens = (torch.arange(_TOKENS, device=found.weight.device) * 7 + 3) % found.num_embeddings
    try:
        with evaluating(model, found.weight.device):
            return act(tokens, found.weight)
    except Exception:  # noqa: BLE001 - see above
        return None


def rounding_of(weight: Tensor) -> float:
    """The rounding of what is computed with this weight: rotations and losses are in float32, whatever it is in."""
    return max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)
