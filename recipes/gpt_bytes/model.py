"""A small decoder-only transformer over bytes.

Pre-norm blocks, rotary positions, causal attention, a squared-ReLU network, and one matrix that both embeds bytes
and scores the next one. It keeps no cache while generating: it is written to be read and copied, not to serve.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.pipeline import Layer

NUM_BYTES = 256
SLOWEST_TURN = 1000.0
INITIAL_DEVIATION = 0.02


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its position's angle, so that q·k depends on the distance only.

    Args:
        x: `[batch, heads, position, d]`.
        angles: `[position, d / 2]`, in radians.

    Reference: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        width: channels of the residual stream.
        heads: attention heads, which share `width` between them.
        context: longest sequence, in bytes.
        dropout: probability of zeroing an attention weight or a channel that a branch adds to the stream.
    """

    angles: Tensor

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        pairs = width // heads // 2
        speeds = SLOWEST_TURN ** (-torch.arange(pairs) / pairs)
        self.register_buffer("angles", torch.outer(torch.arange(context), speeds), persistent=False)
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        """Each position reads itself and those before it; `[batch, position, width]` in and out."""
        angles = self.angles[: x.shape[1]]
        query, key, value = self.attention_in(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        read = F.scaled_dot_product_attention(
            rotate(query, angles),
            rotate(key, angles),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.attention_out(read.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        hidden = F.relu(self.mlp_in(self.mlp_norm(x))).square()
        return x + F.dropout(self.mlp_out(hidden), self.dropout, self.training)


class ByteGPT(nn.Module):
    """Scores of the next byte at every position of a sequence of bytes.

    Args:
        layers: number of blocks.
        width: channels of the residual stream.
        heads: attention heads per block; `width / heads` must be even.
        context: longest sequence, in bytes.
        dropout: probability; 0 is none.
    """

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ArgumentError(
                f"`width` must be a multiple of {2 * heads}, twice the number of heads, but is {width}."
            )
        self.context = context
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False, device="meta")  # draws no weights of its own
        self.head.weight = self.embedding.weight
        self.initialize()

    def initialize(self) -> None:
        """Normal matrices of one deviation, divided by √(2 · layers) where a branch ends in the stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith("_out.weight")
                deviation = INITIAL_DEVIATION / (2 * len(self.blocks)) ** 0.5 if ends_branch else INITIAL_DEVIATION
                nn.init.normal_(parameter, std=deviation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `[batch, position, 256]` for inputs `[batch, position]` of bytes as integers."""
        x = self.dropout(self.embedding(inputs))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def layers(self) -> list[Layer]:
        """Its layers in their order: what a pipeline cuts into stages."""
        blocks = [(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        ends = [("norm", self.norm), ("head", self.head)]
        return [
            Layer(name, module)
            for name, module in [("embedding", self.embedding), ("dropout", self.dropout), *blocks, *ends]
        ]

    @torch.no_grad()
    def generate(
        self, prompt: bytes, *, num_bytes: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> bytes:
        """Draw `num_bytes` bytes, one after the other, from softmax(logits / temperature); the prompt is not repeated.

        Args:
            prompt: at least one byte; the model sees the last `context` of prompt and drawn bytes.
            temperature: above 0; below 1 the likelier bytes become likelier still.
            generator: the randomness, on the CPU.
        """
        if not prompt or temperature <= 0:
            raise ArgumentError(
                f"`prompt` must hold at least one byte and `temperature` be above 0, but they are {prompt!r} and "
                f"{temperature}."
            )
        was_training = self.training
        self.eval()
        text = bytearray(prompt)
        for _ in range(num_bytes):
            window = torch.tensor(list(text[-self.context :]), device=self.embedding.weight.device)
            scores = self(window.unsqueeze(0))[0, -1].float().cpu() / temperature
            text.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
        self.train(was_training)
        return bytes(text[len(prompt) :])
