"""Micro-batches of ready-made tensors on their way through stages, without what a trainer would add."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from evenstep.pipeline import Op
from evenstep.pipeline.stage import Stage


class ReadyStep:
    """The micro-batches of one update.

    Args:
        inputs: of each.
        loss: of the last stage's output, from it and the micro-batch's number.
    """

    def __init__(self, inputs: Sequence[Tensor], loss: Callable[[Tensor, int], Tensor]) -> None:
        self._inputs = inputs
        self._loss = loss

    def forward(
        self, stage: Stage, received: Mapping[int, Any], microbatch: int
    ) -> tuple[Mapping[int, Any], Tensor | None]:
        inputs = self._inputs[microbatch]
        outputs = {0: stage.module(inputs)} if stage.is_whole else stage.module(received, inputs, _begin)
        if not stage.gives_loss:
            return outputs, None
        (output,) = outputs.values()
        return {}, self._loss(output, microbatch)

    def backward(self, loss: Tensor, microbatch: int) -> None:
        loss.backward()

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def done(self, microbatch: int) -> None: ...

    def completed(self, microbatch: int) -> int:
        return microbatch

    def acted(self, op: Op) -> None: ...


def _begin(place: int) -> None: ...
