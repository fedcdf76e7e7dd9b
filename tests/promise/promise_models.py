"""Models of the battery: lists of layers, one of which may be told to fail."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evenstep.pipeline import Layer, Layers

WORDS, WIDTH = 11, 16


class Faulty(nn.Module):
    """The identity, in which a fault strikes once when it is armed."""

    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not Faulty.fault or (Faulty.fault == "memory" and len(x) < 2):
            return x
        fault, Faulty.fault = Faulty.fault, ""
        if fault == "memory":
            raise torch.OutOfMemoryError("injected")
        return x * float("nan")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.linear(self.norm(x)).tanh(), self.dropout, self.training)


def chain(dropout: float) -> list[nn.Module]:
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh()) for _ in range(2)]
    return [nn.Embedding(WORDS, WIDTH), Block(dropout), *middle, Faulty(), Block(dropout), nn.Linear(WIDTH, WORDS)]


def tied(dropout: float) -> list[nn.Module]:
    layers = chain(dropout)
    layers[-1] = nn.Linear(WIDTH, WORDS, bias=False)
    return layers


def frozen(dropout: float) -> list[nn.Module]:
    layers = chain(dropout)
    layers[1].requires_grad_(False)
    layers[-1].requires_grad_(False)
    return layers


def half_frozen(dropout: float) -> list[nn.Module]:
    """The second of two stages has nothing to train."""
    layers = chain(dropout)
    for layer in layers[3:]:
        layer.requires_grad_(False)
    return layers


class Numbers(nn.Module):
    """Adds noise of numpy's and Python's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand()) + random.random() if self.training else x


class Recomputed(nn.Module):
    """Recomputes its block in the backward by itself."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.block = Block(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def drawing(dropout: float) -> list[nn.Module]:
    """One dropout in two places, an activation in three, and numbers of other generators."""
    layers, shared, act = chain(dropout), nn.Dropout(dropout), nn.Tanh()
    layers[1:3] = [act, shared, Recomputed(dropout), act]
    return [*layers[:-1], act, shared, Numbers(), layers[-1]]


class Normalised(nn.Module):
    """Batch normalisation over the samples and words of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def normalised(dropout: float) -> list[nn.Module]:
    layers = chain(dropout)
    layers[3] = Normalised()
    return layers


class Encode(nn.Module):
    """Memory and mask of the source, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor) -> dict[str, Tensor | None]:
        return {"memory": self.linear(self.embedding(source)).tanh(), "mask": source > 0, "bias": None}


class Decode(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, encoded: dict[str, Any]) -> Tensor:
        scores = self.query(x) @ encoded["memory"].transpose(1, 2)
        read = scores.masked_fill(~encoded["mask"][:, None], -1e4).softmax(-1) @ encoded["memory"]
        return x + self.dropout(self.out(read).tanh())


def translator(dropout: float) -> Layers:
    """An encoder whose output goes to every decoder layer; the decoder has inputs of its own."""
    return Layers(
        (
            Layer("encoder", Encode(), inputs=("source",)),
            Layer("embedding", nn.Embedding(WORDS, WIDTH), sources=(), inputs=("input",)),
            Layer("decoder.0", Decode(dropout), sources=("embedding", "encoder")),
            Layer("decoder.1", Decode(dropout), sources=("decoder.0", "encoder")),
            Layer("scores", nn.Linear(WIDTH, WORDS)),
        )
    )


def sparse(dropout: float) -> list[nn.Module]:
    return [nn.Embedding(WORDS, WORDS, sparse=True), nn.Dropout(dropout)]


class Replaced(nn.Module):
    """Puts a new tensor in the place of its buffer, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean((0, 1)).float()
        return x - self.running_mean.to(x.dtype)


def centred(dropout: float) -> list[nn.Module]:
    """The output depends on buffers, which ranks average."""
    layers = chain(dropout)
    layers[3] = nn.Sequential(Replaced(), nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    return layers


LISTS = {
    "chain": chain,
    "tied": tied,
    "frozen": frozen,
    "half frozen": half_frozen,
    "drawing": drawing,
    "normalised": normalised,
    "centred": centred,
    "sparse": sparse,
}
