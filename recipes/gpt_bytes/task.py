"""Predict the next byte: what a batch of windows means to an update.

It knows nothing of the model but that it gives one row of 256 logits per byte.
"""

from math import log

import torch.nn.functional as F
from torch import Tensor

from evenstep import Loss, Task

NATS_PER_BIT = log(2)


class NextByte(Task):
    """Summed cross-entropy of the next byte, in nats; a batch is (inputs, targets), both `[batch, position]`."""

    unit = "tokens"  # a byte is one

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        """The number of bytes that are predicted."""
        return batch[1].numel()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        """−Σ log p(target), with bits per byte and the share of bytes whose likeliest guess is right."""
        targets = batch[1]
        nats = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        num_bytes = targets.numel()
        num_right = (output.argmax(-1) == targets).sum()
        bits = nats.detach() / NATS_PER_BIT
        return Loss(nats, metrics={"bits_per_byte": (bits, num_bytes), "accuracy": (num_right, num_bytes)})
