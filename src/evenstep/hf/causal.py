"""Whether the scores of a model at a place know only the tokens up to it, as the next token's task needs.

A model that looks ahead is told what it is to tell: its loss falls, and it has learned to copy. Some of transformers do
unless their config says otherwise. Which do is tried, not looked up.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.train.side_effects import evaluating, without_side_effects

_TOKENS = 8


def check_causal(model: nn.Module) -> None:
    """Raise ArgumentError if another last token moves the scores of those before it."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    found: object = None if embeddings is None else embeddings()
    if not isinstance(found, nn.Embedding):
        return
    tokens = (torch.arange(_TOKENS, device=found.weight.device) * 7 + 3) % found.num_embeddings
    other = tokens.clone()
    other[-1] = (tokens[-1] + 1) % found.num_embeddings

    def scores(ids: Tensor) -> Tensor:
        output: Any = model(input_ids=ids.unsqueeze(0), use_cache=False)
        return cast(Tensor, output["logits"])[0, :-1].double()

    try:
        with without_side_effects([model]), evaluating(model, found.weight.device):
            one, beside = scores(tokens), scores(other)
    except Exception:  # noqa: BLE001 - it needs more than tokens (images, masks, …), of which nothing is known here
        return
    # Experts take their tokens together, so rounding may differ; what is seen differs by far more.
    moved, largest = float((one - beside).abs().max()), float(one.abs().max())
    if moved > torch.finfo(found.weight.dtype).eps ** 0.75 * largest:
        raise ArgumentError(
            f"`CausalLM` needs a model whose scores know only the tokens up to their place, but another last token "
            f"moves those before it in {type(model).__name__} by {moved:.2g} (they are up to {largest:.2g}): it would "
            f"be told what it is to tell. Build it as a decoder (`config.is_decoder = True`, `config.causal = True`), "
            f"or train it on masked tokens, by `Classification()`."
        )
