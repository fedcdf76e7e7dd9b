"""Several documents in one row: where they begin, how a row is cut between them, and whether a model keeps them apart.

Models of transformers take `position_ids` that begin anew at each document, and hide documents from each other where
they are given no other mask and keep nothing for generation. Which models do is tried, not looked up.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.data.tree import rebuilt
from evenstep.errors import ArgumentError
from evenstep.train.evaluating import evaluating

_FIRST, _SECOND = 4, 5  # tokens of the documents that are tried


def restarts(positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Where a document begins that is not the first of its row; after padding none does.

    Args:
        positions: `[rows, length]`.
        mask: `[rows, length]`, 0 on padding.

    >>> restarts(torch.tensor([[0, 1, 0, 1, 2]])).int().tolist()
    [[0, 0, 1, 0, 0]]
    """
    begins = torch.zeros_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] == 0
    if mask is not None:
        begins[:, 1:] &= mask[:, :-1] != 0
    return begins


def halves_of_row(batch: Any) -> list[Any] | None:
    """A batch of one row in two, between the documents that are nearest to its middle; None where that can't be done.

    >>> row = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> [half["input_ids"].tolist() for half in halves_of_row(row)]
    [[[5, 6, 7]], [[8, 9]]]
    """
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, Tensor) or len(positions) != 1:
        return None
    begins: list[int] = restarts(positions)[0].nonzero().flatten().tolist()
    if not begins:
        return None
    length = positions.shape[1]
    cut = min(begins, key=lambda begin: abs(2 * begin - length))

    def of(part: slice) -> Any:
        return rebuilt(batch, lambda one: one[:, part] if _is_row(one, length) else one)

    return [of(slice(0, cut)), of(slice(cut, length))]


def _is_row(one: Any, length: int) -> bool:
    return isinstance(one, Tensor) and one.shape[:2] == (1, length)


def check_documents(model: nn.Module) -> None:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ArgumentError("`packed` does not go with a learned prompt, which stands before a row; leave it out.")
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
    largest, rounding = float(alone.abs().max()), torch.finfo(weight.dtype).eps
    coarse = max(rounding, torch.finfo(torch.float32).eps)  # some have their softmax in float32, of any weights
    seen, moved = float((packed - beside).abs().max()), float((packed - alone).abs().max())
    if seen > 4 * rounding * largest or moved > coarse**0.5 * largest:
        raise ArgumentError(
            f"`packed` needs a model that keeps the documents of a row apart, but in {type(model).__name__} one moves "
            f"the scores of another by {max(seen, moved):.2g}; try `attn_implementation='sdpa'`.",
            field="packed",
        )
