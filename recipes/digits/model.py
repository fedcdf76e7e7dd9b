"""A small convolutional net for images of 8 × 8 pixels.

Two convolutions, one pooling, one hidden layer. It has no batch normalisation, whose statistics would depend on how
a global batch is cut into micro-batches.
"""

from torch import Tensor, nn

NUM_DIGITS = 10


class ConvNet(nn.Module):
    """Scores of the ten digits.

    Args:
        channels: of the first convolution; the second has twice as many.
        hidden: units of the hidden layer.
        dropout: probability of zeroing a hidden unit.
    """

    def __init__(self, *, channels: int = 32, hidden: int = 128, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, NUM_DIGITS),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, 10]` of images `[batch, 1, 8, 8]`."""
        return self.layers(images)
