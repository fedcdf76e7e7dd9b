"""Trials of a model of `transformers` on a few tokens before it is trained.

Some models look ahead unless their config says otherwise, and some do not keep the documents of a row apart.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.train.forwards import evaluating

_FIRST = 4  # tokens of the first document of a trial, of 9


def _scores(model: nn.Module, ids: Tensor, **given: Tensor) -> Tensor:
    more: dict[str, Any] = {name: one.unsqueeze(0) for name, one in given.items()}
    output: Any = model(input_ids=ids.unsqueeze(0), use_cache=False, **more)
    return cast(Tensor, output["logits"])[0].double()


def check_causal(model: nn.Module) -> None:
    """Raise ArgumentError for a model of tokens whose scores at a place depend on later tokens."""
    try:
        weight = cast("Any", model).get_input_embeddings().weight
        tokens = (torch.arange(8, device=weight.device) * 7 + 3) % len(weight)
        other = tokens.clone()
        other[-1] = (tokens[-1] + 1) % len(weight)
        with evaluating(model, weight.device):
            one = _scores(model, tokens)[:-1]
            beside = _scores(model, other)[:-1]
    except Exception:  # noqa: BLE001 - models in stages, of images, or with inputs beside tokens that are unknown here
        return
    moved = float((one - beside).abs().max())
    # experts take their tokens together, so rounding may differ; a token that is seen differs by far more
    if moved > torch.finfo(weight.dtype).eps ** 0.75 * float(one.abs().max()):
        raise ArgumentError(
            f"`CausalLM` needs scores that depend on earlier tokens alone, but a later token changes the scores of "
            f"{type(model).__name__} by {moved:.2g}; build it as a decoder (`config.is_decoder = True`).",
            field="model",
        )


def check_documents(model: nn.Module) -> None:
    """Raise ArgumentError for a model in which one document of a row moves the scores of another."""
    weight = cast("Any", model).get_input_embeddings().weight
    tokens = torch.arange(9, device=weight.device) * 7 % len(weight)
    other = tokens.clone()
    other[:_FIRST] = (tokens[:_FIRST] + 3) % len(weight)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4], device=weight.device)
    with evaluating(model, weight.device):
        one = _scores(model, tokens, position_ids=positions)[_FIRST:]
        beside = _scores(model, other, position_ids=positions)[_FIRST:]
    moved = float((one - beside).abs().max())
    if moved > 4 * torch.finfo(weight.dtype).eps * float(one.abs().max()):
        raise ArgumentError(
            f"`packed` needs a model that keeps the documents of a row apart, but in {type(model).__name__} one moves "
            f"the scores of another by {moved:.2g}; try `attn_implementation='sdpa'`.",
            field="packed",
        )
