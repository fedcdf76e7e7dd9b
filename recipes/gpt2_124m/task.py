"""Predict the next token: what a batch of windows means to an update."""

import torch.nn.functional as F
from torch import Tensor

from evenstep import Loss, Task


class NextToken(Task):
    """Summed cross-entropy of the next token, in nats; a batch is (inputs, targets), both `[batch, position]`."""

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        """The number of tokens that are predicted."""
        return batch[1].numel()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        """−Σ log p(target)."""
        return Loss(F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"))
