"""The work: a model, ready-made batches, and how many of them make an update.

Small enough that what a trainer adds shows, and well-conditioned, so that rounding in another order stays rounding
over ten thousand updates: activations are smooth, and the optimizer's `eps` is above the rounding of gradients. That is
AdamW with a constant learning rate and the gradient clipped at norm 1.
"""

from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
EPSILON = 1e-6
"""`eps` of AdamW, whose first step is lr·g / (|g| + eps): where |g| is about eps or less, rounding of g by d moves the
parameter by up to lr·d / eps. The transformer's gradients are rounded by 2e-10 to 2e-9, measured beside float64, in
any order of sums. With torch's 1e-8 a dozen elements whose first gradient happens to be so small end up to 3e-5 from
those of another order, and the distance says nothing of who did the same work; with 1e-6 all end within 1e-6.
"""
LOSS_EVERY_UPDATES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every contender is given.

    Args:
        name: of the case.
        model: the initial parameters; each contender trains a copy.
        batches: pairs (inputs, classes), each a micro-batch, in memory.
        num_microbatches: of an update; all of equal size.
        fused: whether the optimizer is one fused kernel.
    """

    name: str
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    num_microbatches: int = 1
    fused: bool = True

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of everybody but the ordinary loop."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, fused=self.fused)


def mean_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of `logits` [..., classes], averaged over everything before the last dim."""
    return functional.cross_entropy(logits.flatten(0, -2), classes.flatten())


def summed_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """The same, summed."""
    return functional.cross_entropy(logits.flatten(0, -2), classes.flatten(), reduction="sum")


def mlp(*, num_microbatches: int = 1) -> Work:
    """A perceptron 32-64-10 with batches of 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    teacher = nn.Linear(32, 10)
    inputs = [torch.randn(32, 32) for _ in range(64)]
    batches = [(one, teacher(one).argmax(1)) for one in inputs]
    name = "mlp 32-64-10, batch 32"
    if num_microbatches > 1:
        name += f", accumulation {num_microbatches}"
    return Work(name=name, model=model, batches=batches, num_microbatches=num_microbatches)


class Block(nn.Module):
    """Causal attention and a perceptron, each on its normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        # A bias of the keys changes nothing: its gradient is pure rounding, which Adam would blow up to full steps.
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        split = self.queries_keys_values(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Any:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.bytes(tokens) + self.places(places)))


def transformer(*, num_microbatches: int = 1) -> Work:
    """4 layers of width 128 over bytes, with batches of 16 × 64."""
    torch.manual_seed(0)
    model = ByteTransformer(width=128, layers=4, heads=4, context=64)
    text = torch.randint(0, 256, (16, 16, 65)) // 3
    batches = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in text]
    name = "transformer 4 × 128, batch 16 × 64"
    if num_microbatches > 1:
        name += f", accumulation {num_microbatches}"
    return Work(name=name, model=model, batches=batches, num_microbatches=num_microbatches)


def vit() -> Work:
    """The vision transformer of the recipe of that name, with batches of 64 images."""
    torch.manual_seed(0)
    recipe = run_path(str(Path(__file__).parents[2] / "recipes" / "vit" / "model.py"))
    batches = [(torch.randn(64, 1, 8, 8), torch.randint(10, (64,))) for _ in range(16)]
    return Work(name="vit 4 × 64, batch 64 × 16 patches", model=recipe["VisionTransformer"](), batches=batches)
