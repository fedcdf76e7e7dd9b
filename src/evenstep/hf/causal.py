"""Whether the scores of a model at a place know only the tokens up to it, and none of the padding before them.

A model that looks ahead is told what it is to tell: its loss falls, and it has learned to copy. Some of transformers do
unless their config says otherwise. Which do is tried, not looked up.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.hf.trial import rounding_of, tried


def counts_padding(model: nn.Module) -> bool:
    """Whether a row that is padded on the left, and masked there, has other scores than the row alone.

    So it is where places are counted from the left, as those of GPT-2 are unless `position_ids` are given.
    """

    def differs(tokens: Tensor, weight: Tensor) -> bool:
        padded = torch.cat([tokens[:2], tokens])
        mask = torch.ones_like(padded)
        mask[:2] = 0

        def scores(ids: Tensor, mask: Tensor) -> Tensor:
            output: Any = model(input_ids=ids.unsqueeze(0), attention_mask=mask.unsqueeze(0), use_cache=False)
            return cast(Tensor, output["logits"])[0, -len(tokens) :].double()

        alone, beside = scores(tokens, mask[2:]), scores(padded, mask)
        return float((alone - beside).abs().max()) > rounding_of(weight) ** 0.5 * float(alone.abs().max())

    return bool(tried(model, differs))


def check_causal(model: nn.Module) -> None:
    """Raise ArgumentError if another last token moves the scores of those before it."""

    def moves(tokens: Tensor, weight: Tensor) -> tuple[float, float, float]:
        other = tokens.clone()
        other[-1] = (tokens[-1] + 1) % len(weight)

        def scores(ids: Tensor) -> Tensor:
            output: Any = model(input_ids=ids.unsqueeze(0), use_cache=False)
            return cast(Tensor, output["logits"])[0, :-1].double()

        one, beside = scores(tokens), scores(other)
        return float((one - beside).abs().max()), float(one.abs().max()), torch.finfo(weight.dtype).eps

    if (found := tried(model, moves)) is None:
        return
    moved, largest, eps = found
    # Experts take their tokens together, so rounding may differ; what is seen differs by far more.
    if moved > eps**0.75 * largest:
        raise ArgumentError(
            f"`CausalLM` needs a model whose scores know only the tokens up to their place, but another last token "
            f"moves those before it in {type(model).__name__} by {moved:.2g} (they are up to {largest:.2g}): it would "
            f"be told what it is to tell. Build it as a decoder (`config.is_decoder = True`, `config.causal = True`), "
            f"or train it on masked tokens, by `Classification()`."
        )
