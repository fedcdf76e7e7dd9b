"""Further runs with one fault each: state and random numbers that stray to where nobody looks for them."""

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from prove_mutants import Classify, Mutant, Net, Run, Words, mutant, padded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

from evenstep.events import Hook

CALLS = [0]


class Few(Words):
    """So few that an epoch is two updates, the second a short one."""

    def __len__(self) -> int:
        return 20


class CountsInGlobal(Classify):
    """Weighs by a global that counts calls."""

    def loss(self, output: Any, batch: Any) -> Any:
        CALLS[0] += 1
        return super().loss(output, batch) * (1 + 0.01 * CALLS[0])


class CountsInClass(Classify):
    """Weighs by a count that all objects of the class have."""

    seen = 0

    def loss(self, output: Any, batch: Any) -> Any:
        CountsInClass.seen += 1
        return super().loss(output, batch) * (1 + 0.01 * CountsInClass.seen)


class CountsEpochs(Classify):
    """Counts epochs by itself, also the one that is gone on with."""

    epoch = 0

    def before_epoch(self, event: Any) -> None:
        self.epoch += 1

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch) / self.epoch


class CountsPadding(Classify):
    """A sum over all places of the padded batch."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch) + 0.01 * output.square().sum(1) @ (batch["tokens"] >= 0).sum(1).to(output)


class DrawsInLoss(Classify):
    """Noise of numpy's on the logits."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output + 0.1 * torch.from_numpy(np.random.normal(size=tuple(output.shape))), batch)


class DrawsInTransform(Classify):
    """Shifts the tokens of a micro-batch by a number of Python's."""

    def transform(self, batch: Any) -> Any:
        shifted = (batch["tokens"] + random.randrange(3)) % 10 + 1
        return {**batch, "tokens": torch.where(batch["tokens"] > 0, shifted, 0)}


class ClipsEach(Classify):
    """Clips what has been summed so far, as a task."""

    def prepare(self, model: nn.Module) -> None:
        self.model = model

    def after_backward(self, event: Any) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)


class SeedsByTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(time.time_ns())
        return functional.dropout(x, 0.5, self.training)


class NoiseOfBatch(nn.Module):
    """Noise as wide as the micro-batch's values."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) * x.detach().std()


class UnitGradient(torch.autograd.Function):
    """Passes values on, and gives the gradient a norm of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return UnitGradient.apply(x)  # pyright: ignore[reportReturnType] - torch does not say


class Remembered(Few):
    """Augments each sample once, and keeps what came out."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index not in self.kept:
            tokens, label = super().__getitem__(index)
            self.kept[index] = (tokens + random.randrange(3)) % 10 + 1, label
        return self.kept[index]


class RememberedByPython(Few):
    """Likewise, by a decorator."""

    @functools.cache  # noqa: B019 - as it is written all the same
    def read(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, label = super().__getitem__(index)
        return (tokens + random.randrange(3)) % 10 + 1, label

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(index)


class ChangedInPlace(Few):
    """Changes the very samples that it keeps."""

    def __init__(self) -> None:
        self.rows = [Words.__getitem__(self, index) for index in range(len(self))]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, label = self.rows[index]
        tokens %= 9
        tokens += 1
        return tokens, label


class OwnState(Few):
    """Draws from a generator of numpy's of its own."""

    def __init__(self) -> None:
        self.chance = np.random.RandomState(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, label = super().__getitem__(index)
        return (tokens + int(self.chance.randint(3))) % 10 + 1, label


class SeededByTime(Few):
    """Draws its tokens by when it was built."""

    def __init__(self) -> None:
        self.built = time.time_ns()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, label = super().__getitem__(index)
        drawn = torch.Generator().manual_seed(self.built + index)
        return torch.randint(1, 11, tokens.shape, generator=drawn), label


def without_twins(samples: list[Any]) -> Any:
    """Keeps one sample of those that begin with the same token."""
    return padded(list({int(tokens[0]): (tokens, label) for tokens, label in samples}.values()))


def as_short(samples: list[Any]) -> Any:
    """Cuts all samples to the shortest one."""
    least = min(len(tokens) for tokens, _ in samples)
    return padded([(tokens[:least], label) for tokens, label in samples])


def with_default(samples: list[Any], seen: list[int] = []) -> Any:  # noqa: B006 - that is the fault
    """Counts its calls in a default argument."""
    seen.append(1)
    batch = padded(samples)
    batch["tokens"][:, 0] = len(seen) % 10 + 1
    return batch


def counted_steps(model: nn.Module) -> torch.optim.Optimizer:
    """A hook of torch's that counts steps in a closure."""
    optimizer, count = torch.optim.SGD(model.parameters(), lr=0.1), {"steps": 0}

    def grow(optimizer: Any, arguments: Any, keywords: Any) -> None:
        count["steps"] += 1
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad.mul_(1 + 0.1 * count["steps"])

    optimizer.register_step_pre_hook(grow)
    return optimizer


class Halves(Hook):
    """A scheduler of torch's that no checkpoint holds."""

    scheduler: Any = None

    def after_update(self, event: Any) -> None:
        rates = torch.optim.lr_scheduler
        self.scheduler = self.scheduler or rates.StepLR(self.trainer.optimizer, 2, 0.5)
        self.scheduler.step()


def few(*rows: str, part: str, **wrong: Any) -> Mutant:
    return mutant(*rows, part=part, **({"dataset": Few} | wrong))


def inner(module: Callable[[], nn.Module], *rows: str, part: str) -> Mutant:
    return few(*rows, part=part, model=lambda: Net(module))


STRAYS: dict[str, Mutant] = {
    "global count": few("again", part="the loss", task=CountsInGlobal),
    "count of a class": few("again", part="the loss", task=CountsInClass),
    "epochs counted": few("resume", part="`task.epoch`", task=CountsEpochs),
    "padding in the sum": few("cuts 4", part="the loss", task=CountsPadding),
    "chance in loss": few("cuts 4", part="the loss", task=DrawsInLoss),
    "chance in transform": few("cuts 4", part="`transform`", task=DrawsInTransform),
    "task that clips": few("cuts 4", part="the gradient of", task=ClipsEach),
    "seeded by time": inner(SeedsByTime, "again", part="module `inner`"),
    "noise of the batch": inner(NoiseOfBatch, "cuts 4", part="module `inner`"),
    "own backward": inner(Unit, "cuts 4", part="the gradient of"),
    "old spectral norm": inner(lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "cuts 4", part="module `inner`"),
    "samples remembered": few("resume", part="`data._dataset.kept", dataset=Remembered),
    "samples in a cache": few("resume", part="the batch", dataset=RememberedByPython),
    "samples changed": few("resume", part="`data._dataset.rows", dataset=ChangedInPlace),
    "behind a Subset": few(
        "resume", part="`data._dataset.dataset.chance`", dataset=lambda: Subset(OwnState(), range(20))
    ),
    "data seeded by time": few("again", part="the batch", dataset=SeededByTime),
    "twins dropped": few("cuts 4", part="the weight", collate=lambda: without_twins),
    "cut to the shortest": few("cuts 4", part="the batch", collate=lambda: as_short),
    "default argument": few("again", part="the batch", collate=lambda: with_default),
    "count in a closure": few("resume", part="the step of", optimizer=counted_steps),
    "scheduler not saved": few(
        "resume", part="`hook Halves.scheduler.optimizer._opt_called`", hooks=lambda: [Halves()]
    ),
}


class Unusual(nn.Module):
    """Whatever is keyed, cast, frozen or cached, and as harmless as it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.RReLU(), nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.LayerNorm(8), nn.GroupNorm(2, 8)
        )
        self.frozen = nn.BatchNorm1d(8).eval()
        self.mean, self.width, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls, self.table, self.last = 0, None, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, x.detach()
        self.table = torch.cos(torch.arange(8.0)) if self.table is None else self.table
        x = self.frozen(self.parts(x)) * self.table
        x = torch.distributions.Normal(self.mean(x), self.width(x).exp()).rsample()
        x = x * torch.distributions.Beta(2.0, 2.0).sample(x.shape).to(x) + torch.poisson(x.detach().abs()) / 100
        x = x * functional.gumbel_softmax(self.gate(x), hard=True)
        halved = functional.linear(x.bfloat16(), self.mean.weight.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            return x + halved.to(x) + self.gate(x).to(x)


class Notes(Hook):
    """Counts and keeps what it sees, and does nothing with it."""

    def __init__(self) -> None:
        self.seen, self.losses = 0, list[float]()

    def after_microbatch(self, event: Any) -> None:
        self.seen += 1
        self.losses.append(float(event.loss))


class Cached(Few):
    """Keeps samples as they are."""

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index)


def longest_first(samples: list[Any]) -> Any:
    return padded(sorted(samples, key=lambda one: -len(one[0])))


UNUSUAL = Run(model=lambda: Net(Unusual), dataset=Cached, hooks=lambda: [Notes()], collate=lambda: longest_first)
