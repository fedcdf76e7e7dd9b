"""A small convolutional net with one trunk and three heads, of which a batch uses one.

The trunk is what the tasks share. It has no batch normalisation, whose statistics would depend on how batches are cut.
"""

from torch import Tensor, nn


class SharedNet(nn.Module):
    """Scores of the ten digits, of even and odd, or the four sides of the box.

    Args:
        channels: of the first convolution; the second has twice as many.
        hidden: units of the last shared layer.
        dropout: probability of zeroing one of them for the two heads that classify.
    """

    def __init__(self, *, channels: int = 24, hidden: int = 192, dropout: float = 0.2) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, hidden),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict(
            {
                "class": nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden, 10)),
                "parity": nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden, 2)),
                "box": nn.Linear(hidden, 4),
            }
        )

    def forward(self, images: Tensor, head: str) -> Tensor:
        """The output `[batch, …]` of one head for images `[batch, 1, 8, 8]`."""
        return self.heads[head](self.trunk(images))
