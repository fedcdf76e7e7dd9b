"""Scores of a model at a place must depend on the tokens up to it alone.

A model that looks ahead learns to copy: its loss falls, and it has learned nothing. Some models of transformers do
unless their config is set otherwise. It is tried on some tokens.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.train.evaluating import evaluating

_TOKENS = 8


def check_causal(model: nn.Module) -> None:
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    try:
        found: object = None if embeddings is None else embeddings()
    except NotImplementedError:  # of models of images
        return
    if not isinstance(found, nn.Embedding):
        return
    weight = found.weight
    tokens = (torch.arange(_TOKENS, device=weight.device) * 7 + 3) % len(weight)
    other = tokens.clone()
    other[-1] = (tokens[-1] + 1) % len(weight)

    def scores(ids: Tensor) -> Tensor:
        output: Any = model(input_ids=ids.unsqueeze(0), use_cache=False)
        return cast(Tensor, output["logits"])[0, :-1].double()

    try:
        with evaluating(model, weight.device):
            one, beside = scores(tokens), scores(other)
    except Exception:  # noqa: BLE001 - the model may need more than tokens, of which nothing is known here
        return
    moved, largest = float((one - beside).abs().max()), float(one.abs().max())
    # experts take their tokens together, so rounding may differ; a token that is seen differs by far more
    if moved > torch.finfo(weight.dtype).eps ** 0.75 * largest:
        raise ArgumentError(
            f"`CausalLM` needs scores that depend on earlier tokens alone, but a later token moves those of "
            f"{type(model).__name__} by {moved:.2g}; build it as a decoder (`config.is_decoder = True`).",
            field="model",
        )
