"""The last linear layer of a language model, giving the summed `chunked_cross_entropy` instead of scores.

So it computes within the model's forward, where shards are whole.
"""

from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.train import chunked_cross_entropy
from evenstep.train.forwards import evaluating


@final
class ChunkedHead:
    """The targets that a task gives to the head of its model."""

    def __init__(self) -> None:
        self._expected: tuple[Tensor, Tensor | None] | None = None

    def attach(self, model: nn.Module) -> None:
        """Let the model's head give losses where targets are expected; ArgumentError if it has no such head."""
        asked: Any = getattr(model, "get_output_embeddings", None)
        linear: object = None if asked is None else asked()
        if type(linear) is not nn.Linear:
            raise ArgumentError(
                f"`chunked` needs a model whose head is one `nn.Linear`, but that of {type(model).__name__} is a "
                f"{type(linear).__name__}.",
                field="chunked",
            )
        linear.__dict__.pop("forward", None)  # that of another task
        _check_scores(model, linear)
        linear.forward = partial(self._forward, linear)

    def expect(self, targets: Tensor, weights: Tensor | None) -> None:
        """Set the targets of the next forward, `[rows, length]`, −100 where none is counted, and their weights."""
        self._expected = targets, weights

    def _forward(self, linear: nn.Linear, input: Tensor) -> Tensor:
        if self._expected is None:
            return nn.Linear.forward(linear, input)
        targets, weights = self._expected
        self._expected = None
        return chunked_cross_entropy(input, linear.weight, targets, bias=linear.bias, weights=weights)


def _check_scores(model: nn.Module, linear: nn.Linear) -> None:
    device = linear.weight.device
    tokens = torch.arange(3, device=device).unsqueeze(0)
    decoder = {"decoder_input_ids": tokens} if getattr(cast(Any, model).config, "is_encoder_decoder", False) else {}
    given: list[Tensor] = []

    def scores(input: Tensor) -> Tensor:
        given.append(100 * torch.randn(*input.shape[:-1], linear.out_features).to(input))
        return given[-1]

    with evaluating(model, device):
        linear.forward = scores
        try:
            output: Any = model(input_ids=tokens, use_cache=False, **decoder)
        finally:
            del linear.forward
    logits = cast(Tensor, output["logits"])
    if len(given) != 1 or not torch.equal(logits.to(given[0].dtype), given[0]):
        raise ArgumentError(
            f"`chunked` needs a model that gives its head's scores as they are, but {type(model).__name__} changes "
            f"them; leave it out.",
            field="chunked",
        )
