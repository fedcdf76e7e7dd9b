"""Further runs with one fault each: what users of other trainers do that is harmless there, or goes unseen."""

import random
from collections.abc import Callable
from typing import Any

import torch
from prove_mutants import Classify, Mutant, inner, mutant
from torch import Tensor, nn
from torch.nn import functional

from evenstep.events import Hook
from evenstep.train import Loss


class UndeclaredMean(Classify):
    """A mean, where the weight counts samples."""

    def loss(self, output: Any, batch: Any) -> Any:
        return Loss(functional.cross_entropy(output, batch["labels"]))


class ClassWeights(Classify):
    """A mean that torch divides by the weights of the classes, taken for one over samples."""

    def loss(self, output: Any, batch: Any) -> Any:
        of_classes = torch.tensor([1.0, 2.0, 5.0], dtype=output.dtype)
        return Loss.of_mean(functional.cross_entropy(output, batch["labels"], weight=of_classes), len(output))


class ByPaddedLength(Classify):
    """Divided by the length to which the micro-batch is padded."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch) / batch["tokens"].shape[1]


class Hardest(Classify):
    """Only the harder half of the micro-batch counts."""

    def loss(self, output: Any, batch: Any) -> Any:
        each = functional.cross_entropy(output, batch["labels"], reduction="none")
        return 2 * each.topk(max(1, len(each) // 2)).values.sum()


class Mixed(Classify):
    """Each sample has the tokens of its neighbour in the micro-batch."""

    def transform(self, batch: Any) -> Any:
        return {**batch, "tokens": batch["tokens"].roll(1, 0)}


class Depth(nn.Module):
    """Left out by a coin of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(x) if random.random() < 0.5 else x


class Running(nn.Module):
    """Subtracts a running mean that is a number of Python's, in an attribute with an underscore."""

    def __init__(self) -> None:
        super().__init__()
        self._mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self._mean = 0.9 * self._mean + 0.1 * float(x.detach().mean())
        return x - self._mean


class Codebook(nn.Module):
    """A parameter that follows what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.code
        self.code.data.lerp_(x.detach().mean(0).to(self.code.dtype), 0.1)
        return y


class Statistics(nn.Module):
    """Running statistics of each micro-batch, which training does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x[:, None])[:, 0]


class ClipsEach(Hook):
    """Clips what has been summed so far, after each micro-batch."""

    def after_backward(self, event: Any) -> None:
        nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 0.05)


class StepsRates(Hook):
    """A scheduler of torch's that counts micro-batches."""

    scheduler: Any = None

    def after_microbatch(self, event: Any) -> None:
        self.scheduler = self.scheduler or torch.optim.lr_scheduler.ExponentialLR(self.trainer.optimizer, 0.9)
        self.scheduler.step()


class StepsEach(Hook):
    """A step of its own after each micro-batch."""

    def after_backward(self, event: Any) -> None:
        with torch.no_grad():
            for one in self.trainer.model.parameters():
                one.sub_(one.grad, alpha=0.01)


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


def hooked(hook: Callable[[], Hook], part: str) -> Mutant:
    return mutant("cuts 4", part=part, hooks=lambda: [hook()])


MISUSES: dict[str, Mutant] = {
    "mean without a weight": mutant("loss", "cuts 4", part="the loss of micro-batch 0", task=UndeclaredMean),
    "weights of classes": mutant("cuts 4", part="the loss", task=ClassWeights),
    "padded length": mutant("cuts 4", part="the loss", task=ByPaddedLength),
    "hardest of the batch": mutant("loss", "cuts 4", part="the loss of micro-batch 0", task=Hardest),
    "neighbours mixed": mutant("cuts 4", part="`transform`", task=Mixed),
    "coin of Python's": inner(Depth, "cuts 4", part="module `inner`"),
    "running number": inner(Running, "cuts 4", "resume", part="module `inner`"),
    "parameter written to": inner(Codebook, "cuts 4", part="module `inner`"),
    "spectral norm": inner(spectral, "cuts 4", part="module `inner`"),
    "statistics unused": inner(Statistics, "cuts 4", part="`inner.norm.running_var`"),
    "clipped each time": hooked(ClipsEach, "the gradient of"),
    "rates by micro-batch": hooked(StepsRates, "the step of"),
    "steps by micro-batch": hooked(StepsEach, "`embed.weight`"),
}
