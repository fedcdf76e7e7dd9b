"""Trials of a model of `transformers` on a few tokens before it is trained, and rows of several documents.

Some models look ahead unless their config says otherwise, and some do not keep the documents of a row apart.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.data.tree import rebuilt
from evenstep.errors import ArgumentError
from evenstep.pipeline import PipelineModel
from evenstep.train.forwards import evaluating

_TOKENS = 8
_FIRST = 4  # tokens of the first document of a trial
_SECOND = 5


def check_whole(task: object, model: nn.Module) -> None:
    """Raise ArgumentError for a model in stages, and for losses of a model's own, which the tasks would leave out."""
    if isinstance(model, PipelineModel):
        raise ArgumentError(
            f"of models in stages only those of `layers_of` are trained, by a plain `CausalLM()`, but the task is "
            f'`{type(task).__name__}`; use `strategy="fsdp"`.',
            field="model",
        )
    config: Any = getattr(model, "config", None)
    for one in (config, getattr(config, "text_config", None)):
        if getattr(one, "output_router_logits", False):
            raise ArgumentError(
                "the loss that `output_router_logits` adds depends on how a batch is cut; set it to False in the "
                "model's config.",
                field="output_router_logits",
            )


def check_causal(model: nn.Module) -> None:
    """Raise ArgumentError for a model of tokens whose scores at a place depend on later tokens."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    try:
        found: object = None if embeddings is None else embeddings()
    except NotImplementedError:  # models of images
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
            one = scores(tokens)
            beside = scores(other)
    except Exception:  # noqa: BLE001 - the model may need inputs beside tokens, which are unknown here
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
    weight = next(model.parameters())
    vocab = len(cast(Any, model).get_input_embeddings().weight)
    tokens = torch.arange(_FIRST + _SECOND, device=weight.device) * 7 % vocab
    other = tokens.clone()
    other[:_FIRST] = (tokens[:_FIRST] + 3) % vocab
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)]).to(weight.device)

    def scores(ids: Tensor, places: Tensor) -> Tensor:
        output: Any = model(input_ids=ids.unsqueeze(0), position_ids=places.unsqueeze(0), use_cache=False)
        return cast(Tensor, output["logits"])[0, -_SECOND:].double()

    with evaluating(model, weight.device):
        alone = scores(tokens[_FIRST:], positions[_FIRST:])
        packed = scores(tokens, positions)
        beside = scores(other, positions)
    largest = float(alone.abs().max())
    rounding = torch.finfo(weight.dtype).eps
    coarse = max(rounding, torch.finfo(torch.float32).eps)  # some have their softmax in float32, of any weights
    seen = float((packed - beside).abs().max())
    moved = float((packed - alone).abs().max())
    if seen > 4 * rounding * largest or moved > coarse**0.5 * largest:
        raise ArgumentError(
            f"`packed` needs a model that keeps the documents of a row apart, but in {type(model).__name__} one moves "
            f"the scores of another by {max(seen, moved):.2g}; try `attn_implementation='sdpa'`.",
            field="packed",
        )


def restarts(positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Places `[rows, length]` where a document begins that is not the first of its row; after padding none does.

    >>> restarts(torch.tensor([[0, 1, 0, 1, 2]])).int().tolist()
    [[0, 0, 1, 0, 0]]
    """
    begins = torch.zeros_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] == 0
    if mask is not None:
        begins[:, 1:] &= mask[:, :-1] != 0
    return begins


def halves_of_row(batch: Any) -> list[Any] | None:
    """A batch of one row in two, between the documents nearest to its middle; None where that can't be done."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, Tensor) or len(positions) != 1:
        return None
    begins: list[int] = restarts(positions)[0].nonzero().flatten().tolist()
    if not begins:
        return None
    length = positions.shape[1]
    cut = min(begins, key=lambda begin: abs(2 * begin - length))

    def part(begin: int, end: int) -> Any:
        return rebuilt(batch, lambda one: one[:, begin:end] if _is_row(one, length) else one)

    return [part(0, cut), part(cut, length)]


def _is_row(one: Any, length: int) -> bool:
    return isinstance(one, Tensor) and one.shape[:2] == (1, length)
