"""Classify: what a batch of images and their classes means to an update."""

import torch.nn.functional as F
from torch import Tensor

from evenstep import Loss, Task


class Classify(Task):
    """Summed cross-entropy of the right class, in nats; a batch is (images, classes `[batch]`).

    Inputs (the images) and weight (their number) are a task's defaults.
    """

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        """−Σ log p(class), with the share of images whose likeliest class is right."""
        classes = batch[1]
        nats = F.cross_entropy(output, classes, reduction="sum")
        num_right = (output.argmax(-1) == classes).sum()
        return Loss(nats, metrics={"accuracy": (num_right, classes.numel())})
