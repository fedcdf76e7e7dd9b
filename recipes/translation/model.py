"""An encoder-decoder transformer over bytes, cut into stages between any of its blocks.

Every decoder block reads the encoder's output, and the mask of its padding, wherever either stands. While it
translates it keeps no cache: it is written to be read and copied, not to serve.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.pipeline import Layer, Layers

NUM_TOKENS, PAD, BEGIN, END = 259, 256, 257, 258


class Encoded(TypedDict):
    """What the encoder hands on: `x` [batch, source, width], and where `mask` [batch, source] it is no padding."""

    x: Tensor
    mask: Tensor


class Attention(nn.Module):
    """Each position of `x` reads `memory`: all that the mask allows, or itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.memory = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.memory(memory).unflatten(-1, (2, self.heads, -1)).transpose(1, 3).unbind(2)
        allowed = None if mask is None else mask[:, None, None, :]
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=mask is None)
        return self.out(read.transpose(1, 2).flatten(-2))


class Embed(nn.Module):
    """Bytes and their places as vectors."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.places(places))


class Source(nn.Module):
    """The beginning of the encoder."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embed = Embed(width, context, dropout)

    def forward(self, source: Tensor) -> Encoded:
        return {"x": self.embed(source), "mask": source != PAD}


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the mask goes through."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, encoded: Encoded) -> Encoded:
        x, mask = encoded["x"], encoded["mask"]
        read = self.attention_norm(x)
        x = x + self.dropout(self.attention(read, read, mask))
        return {"x": x + self.dropout(self.mlp(self.mlp_norm(x))), "mask": mask}


class DecoderBlock(nn.Module):
    """As the encoder's, causal, and between the two it reads what was encoded."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self_norm, self.self_attention = nn.LayerNorm(width), Attention(width, heads)
        self.cross_norm, self.cross_attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, encoded: Encoded) -> Tensor:
        read = self.self_norm(x)
        x = x + self.dropout(self.self_attention(read, read, None))
        x = x + self.dropout(self.cross_attention(self.cross_norm(x), encoded["x"], encoded["mask"]))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def mlp(width: int) -> nn.Sequential:
    """Four times as wide inside."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Scores(nn.Module):
    """Logits of the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, NUM_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Translator(nn.Module):
    """Logits [batch, target, 259] for a source and the target so far.

    Args:
        blocks: of the encoder, and of the decoder.
        width: channels.
        heads: of each attention, which share `width` between them.
        context: longest source or target, in bytes.
        dropout: probability; 0 is none.
    """

    def __init__(self, *, blocks: int, width: int, heads: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.source, self.target = Source(width, context, dropout), Embed(width, context, dropout)
        self.encoder = nn.ModuleList(EncoderBlock(width, heads, dropout) for _ in range(blocks))
        self.decoder = nn.ModuleList(DecoderBlock(width, heads, dropout) for _ in range(blocks))
        self.scores = Scores(width)

    def layers(self) -> Sequence[Layer]:
        """What a pipeline cuts into stages."""
        encoded = f"encoder.{len(self.encoder) - 1}"
        return [
            Layer("source", self.source, inputs=("source",)),
            *(Layer(f"encoder.{number}", block) for number, block in enumerate(self.encoder)),
            Layer("target", self.target, sources=(), inputs=("tokens",)),
            *(
                Layer(f"decoder.{number}", block, sources=(f"decoder.{number - 1}" if number else "target", encoded))
                for number, block in enumerate(self.decoder)
            ),
            Layer("scores", self.scores),
        ]

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        return self.decode(tokens, self.encode(source))

    def encode(self, source: Tensor) -> Encoded:
        """What the decoder reads."""
        encoded = self.source(source)
        for block in self.encoder:
            encoded = block(encoded)
        return encoded

    def decode(self, tokens: Tensor, encoded: Encoded) -> Tensor:
        """Logits at every position of `tokens`."""
        x = self.target(tokens)
        for block in self.decoder:
            x = block(x, encoded)
        return self.scores(x)

    @torch.no_grad()
    def translate(self, source: Tensor, *, max_bytes: int) -> list[bytes]:
        """The likeliest byte, one after the other, until END.

        Args:
            source: [batch, source], padded.
            max_bytes: of each translation.
        """
        was_training = self.training
        if was_training:
            self.eval()
        encoded = self.encode(source)
        tokens = torch.full((len(source), 1), BEGIN, device=source.device)
        for _ in range(max_bytes):
            best = self.decode(tokens, encoded)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], 1)
            if (tokens == END).any(1).all():
                break
        if was_training:
            self.train()
        return [bytes_of(row) for row in tokens[:, 1:].tolist()]


def bytes_of(tokens: list[int]) -> bytes:
    """A text up to its END."""
    end = tokens.index(END) if END in tokens else len(tokens)
    return bytes(token for token in tokens[:end] if token < 256)


def in_layers(**arguments: Any) -> Layers:
    """The layers of a `Translator`: one process, too, runs them as a stage, with the dropout masks of any pipeline."""
    return Layers.of(Translator(**arguments))
