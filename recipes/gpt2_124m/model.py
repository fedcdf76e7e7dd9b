"""A decoder of GPT-2's size, as speedruns have modernised it: rotary positions, normalised queries and keys, ReLU².

Norms have no parameters, projections back into the stream and the scores begin at zero, and scores are softly capped:
30 · tanh(x / 30). What the records of 2025 and later add (value embeddings, windows, merged layers) is left out: it is
to be read and changed. Reference: Jordan et al., modded-nanogpt (github.com/KellerJordan/modded-nanogpt), 2024.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.pipeline import Layer

SLOWEST_TURN, CAP = 10_000.0, 30.0


def norm(x: Tensor) -> Tensor:
    """x / √mean(x²), over the last dim."""
    return F.rms_norm(x, (x.shape[-1],))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + d/2}) turned by its position's angle.

    Args:
        x: `[batch, heads, position, d]`.
        angles: `[position, d / 2]`, in radians.
    """
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Embedding(nn.Module):
    """The normalised vector of each token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return norm(self.tokens(inputs))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); no biases.

    Args:
        width: channels.
        heads: attention heads, which share `width`; `width / heads` is even.
        context: longest sequence.
    """

    angles: Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        pairs = width // heads // 2
        speeds = SLOWEST_TURN ** (-torch.arange(pairs) / pairs)
        self.register_buffer("angles", torch.outer(torch.arange(context), speeds), persistent=False)
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.attended = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.attended.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x: Tensor) -> Tensor:
        angles, given = self.angles[: x.shape[1]], norm(x)
        query, key, value = (
            layer(given).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = (turned(norm(one), angles) for one in (query, key))
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(read.transpose(1, 2).flatten(-2))
        return x + self.narrow(F.relu(self.wide(norm(x))).square())


class Head(nn.Module):
    """Softly capped scores of the next token, in float32."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, tokens, bias=False)
        nn.init.zeros_(self.scores.weight)

    def forward(self, x: Tensor) -> Tensor:
        return CAP * torch.tanh(self.scores(norm(x)).float() / CAP)


class GPT(nn.Module):
    """Scores `[batch, position, tokens]` of the next token for tokens `[batch, position]`.

    Args:
        tokens: of the vocabulary.
        layers: number of blocks.
        width, heads, context: see `Block`.
    """

    def __init__(self, *, tokens: int, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ArgumentError(f"`width` must be a multiple of {2 * heads}, twice the heads, but is {width}.")
        self.embedding = Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.head = Head(tokens, width)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def layers(self) -> list[Layer]:
        """Its layers in their order: what a pipeline cuts into stages."""
        blocks = [Layer(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        return [Layer("embedding", self.embedding), *blocks, Layer("head", self.head)]
