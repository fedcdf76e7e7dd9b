"""A vision transformer: an image is a row of patches, which attend to each other.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", 2021. What is
classified is the mean over patches, as in Beyer et al., "Better plain ViT baselines for ImageNet-1k", 2022, so there is
no token of a class.
"""

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.pipeline import Layer


class Patches(nn.Module):
    """Each patch of `patch × patch` pixels as a vector, plus that of its place; `[batch, patch, width]`."""

    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.places = nn.Parameter(torch.empty((side // patch) ** 2, width).normal_(std=0.02))

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(images).flatten(2).transpose(1, 2) + self.places


class Classifier(nn.Module):
    """Scores of the classes from the normalised mean over patches."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x).mean(1))


class VisionTransformer(nn.Module):
    """Scores `[batch, classes]` of images `[batch, 1, side, side]`.

    Args:
        side: of an image, in pixels, a multiple of `patch`.
        patch: side of a patch, in pixels.
        layers: number of blocks: torch's own encoder layer, normalised first, without biases.
        width: channels, a multiple of `heads`.
        heads: attention heads per block.
        dropout: probability.
        classes: how many.
    """

    def __init__(
        self,
        *,
        side: int = 8,
        patch: int = 2,
        layers: int = 4,
        width: int = 64,
        heads: int = 4,
        dropout: float = 0.0,
        classes: int = 10,
    ) -> None:
        super().__init__()
        if side % patch:
            raise ArgumentError(f"`side` must be a multiple of the patches' {patch} pixels, but is {side}.")
        self.patches = Patches(side, patch, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True, bias=False
            )
            for _ in range(layers)
        )
        self.classifier = Classifier(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x)

    def layers(self) -> list[Layer]:
        """Its layers in their order: what a pipeline cuts into stages."""
        blocks = [Layer(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        return [Layer("patches", self.patches), *blocks, Layer("classifier", self.classifier)]
