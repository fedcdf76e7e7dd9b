"""Whether the scores of a model at a place know only the tokens up to it, and none of the padding before them.

A model that looks ahead is told what it is to tell: its loss falls, and it has learned to copy. Some of transformers do
unless their config says otherwise. Which do is tried, not looked up.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.train.side_effects import evaluating, without_side_effects

_TOKENS = 8


def tokens_for(model: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Some tokens `[length]` to try a model on, and its embeddings of them; None where it has no such embeddings."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    found: object = None if embeddings is None else embeddings()
    if not isinstance(found, nn.Embedding):
        return None
    return (torch.arange(_TOKENS, device=found.weight.device) * 7 + 3) % found.num_embeddings, found.weight


def counts_padding(model: nn.Module) -> bool:
    """Whether a row that is padded on the left, and masked there, has other scores than the row alone.

    So it is where places are counted from the left, as those of GPT-2 are unless `position_ids` are given.
    """
    if (given := tokens_for(model)) is None:
        return False
    tokens, weight = given
    padded = torch.cat([tokens[:2], tokens])
    mask = torch.ones_like(padded)
    mask[:2] = 0

    def scores(ids: Tensor, mask: Tensor) -> Tensor:
        output: Any = model(input_ids=ids.unsqueeze(0), attention_mask=mask.unsqueeze(0), use_cache=False)
        return cast(Tensor, output["logits"])[0, -_TOKENS:].double()

    try:
        with without_side_effects([model]), evaluating(model, weight.device):
            alone, beside = scores(tokens, mask[2:]), scores(padded, mask)
    except Exception:  # noqa: BLE001 - it needs more than tokens and a mask, or takes no mask
        return False
    rounding = max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)  # rotations are in float32
    return float((alone - beside).abs().max()) > rounding**0.5 * float(alone.abs().max())


def check_causal(model: nn.Module) -> None:
    """Raise ArgumentError if another last token moves the scores of those before it."""
    if (given := tokens_for(model)) is None:
        return
    tokens, weight = given
    other = tokens.clone()
    other[-1] = (tokens[-1] + 1) % len(weight)

    def scores(ids: Tensor) -> Tensor:
        output: Any = model(input_ids=ids.unsqueeze(0), use_cache=False)
        return cast(Tensor, output["logits"])[0, :-1].double()

    try:
        with without_side_effects([model]), evaluating(model, weight.device):
            one, beside = scores(tokens), scores(other)
    except Exception:  # noqa: BLE001 - it needs more than tokens (images, masks, …), of which nothing is known here
        return
    # Experts take their tokens together, so rounding may differ; what is seen differs by far more.
    moved, largest = float((one - beside).abs().max()), float(one.abs().max())
    if moved > torch.finfo(weight.dtype).eps ** 0.75 * largest:
        raise ArgumentError(
            f"`CausalLM` needs a model whose scores know only the tokens up to their place, but another last token "
            f"moves those before it in {type(model).__name__} by {moved:.2g} (they are up to {largest:.2g}): it would "
            f"be told what it is to tell. Build it as a decoder (`config.is_decoder = True`, `config.causal = True`), "
            f"or train it on masked tokens, by `Classification()`."
        )
