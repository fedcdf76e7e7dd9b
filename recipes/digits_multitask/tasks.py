"""The three tasks: which head a batch uses, what it weighs, and its summed loss."""

from typing import Any

import torch.nn.functional as F
from digits import MISSING, SIDE
from torch import Tensor

from evenstep import Loss, Task

Batch = tuple[Tensor, Tensor]


class OfHead(Task):
    """A task that uses one head of the net.

    Args:
        head: its name.
    """

    def __init__(self, head: str) -> None:
        self.head = head

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The images, and the head to use."""
        return {"images": batch[0], "head": self.head}


class Classify(OfHead):
    """Summed cross-entropy of the right class, in nats, over the images that have a label."""

    def weight(self, batch: Batch) -> Tensor:
        """How many of the images have a label."""
        return (batch[1] != MISSING).sum()

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        """−Σ log p(class), with the share of images whose likeliest class is right."""
        labels = batch[1]
        nats = F.cross_entropy(output, labels, ignore_index=MISSING, reduction="sum")
        right = (output.argmax(-1) == labels).sum()
        return Loss(nats, metrics={"accuracy": (right, (labels != MISSING).sum())})


class Enclose(OfHead):
    """Summed squared error of the four sides of the box, as shares of the image's side."""

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        """Σ(side − its place)², with the mean error of a side in pixels."""
        errors = output - batch[1]
        return Loss(errors.square().sum(), metrics={"error_px": (errors.detach().abs().sum() * SIDE, errors.numel())})
