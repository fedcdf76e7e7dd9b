"""The summed cross-entropy of scores that are never in memory all at once; the backward computes them again.

torch's `linear_cross_entropy` (2.13) computes in float32 under autocast, weighs no tokens, and is not in torch 2.11.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from evenstep.errors import ArgumentError

__all__ = ["chunked_cross_entropy"]

_ELEMENTS = 2**24  # of the scores of a chunk: 64 MiB in float32


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Σ_t w_t · (log Σ_v exp(z_tv) − z_{t, target_t}) with z = hidden · weightᵀ + bias, over the targets that count.

    Products are in the formats of `linear`, autocast included; all else is in float32 (float64 for float64). In memory
    at a time are a few tensors `[chunk_tokens, vocab]`. With `fsdp` the model calls it in its forward.

    Args:
        hidden: `[…, width]`, the inputs of the head.
        weight: `[vocab, width]`, the head's matrix; `bias` is `[vocab]`.
        targets: `[…]`, the number of each token's right score; `ignore_index` for tokens that do not count.
        weights: `[…]`, constants w_t, 1 by default.
        chunk_tokens: tokens whose scores are made together; by default 64 MiB of scores, or as much as `hidden` holds.

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(100, 8)
    >>> targets = torch.randint(100, (2, 5))
    >>> plain = functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    >>> bool(torch.isclose(chunked_cross_entropy(hidden, weight, targets, chunk_tokens=3), plain))
    True
    """
    if _is_shard(hidden) or _is_shard(weight):
        raise ArgumentError(
            "`weight` is in shards; call `chunked_cross_entropy` in the forward of the module that holds it.",
            field="weight",
        )
    if chunk_tokens is None:
        chunk_tokens = max(1, max(_ELEMENTS, hidden.numel()) // max(1, weight.shape[0]))
    kind = hidden.device.type
    # autocast leaves float64 as it is
    casts = torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype)
    computed = torch.get_autocast_dtype(kind) if casts else hidden.dtype
    given = None if weights is None else weights.flatten()
    return _Chunked.apply(
        hidden.flatten(0, -2), weight, bias, targets.flatten(), given, ignore_index, chunk_tokens, computed
    )


def _is_shard(one: Tensor) -> bool:
    if hasattr(one, "placements"):
        return True
    return not torch.compiler.is_compiling() and one.numel() > 0 and one.untyped_storage().nbytes() == 0


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        ignore_index: int,
        chunk_tokens: int,
        computed: torch.dtype,
    ) -> Tensor:
        wide = torch.float64 if computed == torch.float64 else torch.float32
        counts = targets != ignore_index
        share = counts.to(wide) if weights is None else counts * weights.to(wide)
        right = targets.masked_fill(~counts, 0).to(torch.int64).unsqueeze(1)
        logs = torch.empty(len(hidden), dtype=wide, device=hidden.device)  # log Σ exp of each token's scores
        losses = torch.empty_like(logs)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(computed), None if bias is None else bias.to(computed)
            for chunk in _chunks(len(hidden), chunk_tokens):
                scores = functional.linear(hidden[chunk].to(computed), *head).to(wide)
                logs[chunk] = scores.logsumexp(1)
                losses[chunk] = logs[chunk] - scores.gather(1, right[chunk]).squeeze(1)
        ctx.save_for_backward(hidden, weight, bias, right, share, logs)
        ctx.chunk_tokens, ctx.computed = chunk_tokens, computed
        return losses.mul_(share).masked_fill_(~counts, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, right, share, logs = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=logs.dtype) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=logs.dtype) if needs[2] else None
        share = (share * gradient).unsqueeze(1)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix, offset = weight.to(ctx.computed), None if bias is None else bias.to(ctx.computed)
            for chunk in _chunks(len(hidden), ctx.chunk_tokens):
                some = hidden[chunk].to(ctx.computed)
                scores = functional.linear(some, matrix, offset).to(logs.dtype)
                # share · (softmax − 1 at the right score), in the place of the scores
                scores.sub_(logs[chunk].unsqueeze(1)).exp_()
                scores.scatter_add_(1, right[chunk], -torch.ones_like(right[chunk], dtype=scores.dtype))
                slopes = scores.mul_(share[chunk]).to(ctx.computed)
                if of_hidden is not None:
                    of_hidden[chunk] = slopes @ matrix
                if of_weight is not None:
                    of_weight += slopes.T @ some
                if of_bias is not None:
                    of_bias += slopes.sum(0, dtype=logs.dtype)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if bias is None or of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(begin, begin + chunk_tokens) for begin in range(0, tokens, chunk_tokens)]
