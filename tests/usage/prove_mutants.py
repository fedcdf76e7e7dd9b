"""Runs with one fault each, as users of trainers have filed them, and a sound one."""

import random
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import evenstep
from evenstep.data import Data
from evenstep.events import Hook
from evenstep.options import Checkpointing, Logging, Training
from evenstep.parallel import Group, strategy_named
from evenstep.tools.prove.rows import Prover
from evenstep.tools.prove.run import Ended, RefusedError, Subject, Variant
from evenstep.train import Loss, Task

GLOBAL = 12
SIZES = {"1": 12, "2": 6, "4": 3, "ragged": 5}


def nowhere(variant: Variant, /, **_: Any) -> Ended:
    """Refuses to run anything in processes of its own."""
    raise RefusedError("no processes of its own")


class Words(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """48 sequences of 3 to 7 tokens, and a class each."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 3 + index % 5
        tokens = torch.randint(1, 11, (length,), generator=generator)
        return tokens, torch.tensor(index % 3)


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True)
    return {"tokens": tokens, "labels": torch.stack([label for _, label in samples])}


class Net(nn.Module):
    """Embeds, averages what is no padding, and classifies; parts can be put in between."""

    def __init__(self, inner: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.mix = nn.Linear(8, 8)
        self.inner = inner()
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = (tokens != 0).to(torch.get_default_dtype())[..., None]
        mean = (self.embed(tokens) * seen).sum(1) / seen.sum(1)
        return self.head(self.inner(torch.tanh(self.mix(mean))))


class Classify(Task):
    def inputs(self, batch: Any) -> Any:
        return batch["tokens"]

    def weight(self, batch: Any) -> float:
        return len(batch["labels"])

    def loss(self, output: Any, batch: Any) -> Any:
        return functional.cross_entropy(output, batch["labels"], reduction="sum")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is made of; what is left out is sound."""

    model: Callable[[], nn.Module] = Net
    task: Callable[[], Task] = Classify
    dataset: Callable[[], Any] = Words
    collate: Callable[[], Callable[[Any], Any]] = lambda: padded
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(
        default=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    hooks: Callable[[], Sequence[Hook]] = field(default=tuple)
    schedule: Callable[[], Any] | None = None

    def prover(self, updates: int = 4, **more: Any) -> Prover:
        @contextmanager
        def open_subject(variant: Variant) -> Generator[Subject]:
            torch.manual_seed(7)
            model, task, collate = self.model(), self.task(), self.collate()
            optimizer, schedule = self.optimizer(model), self.schedule and self.schedule()
            data = evenstep.MapData(
                self.dataset(), global_batch_size=GLOBAL, micro_batch_size=SIZES[variant.cut], collate=collate
            )
            checks = Training(check_loss=variant.checks_loss, clip_norm=1.0)

            def trainer(data: Data, hooks: Sequence[Hook], folder: Path | None) -> evenstep.Trainer:
                return evenstep.Trainer(
                    model=model,
                    task=task,
                    optimizer=optimizer,
                    data=data,
                    updates=20,
                    device="cpu",
                    strategy=strategy_named("single", Group(), reduction="ordered"),
                    lr_schedule=schedule,
                    hooks=hooks,
                    folder=folder,
                    train=checks,
                    checkpoint=Checkpointing(asynchronous=False),
                    log=Logging(writers=()),
                )

            yield Subject(
                model=model,
                tasks={"": task},
                optimizer=optimizer,
                data=data,
                hooks=list(self.hooks()),
                trainer=trainer,
                lr_schedule=schedule,
            )

        return Prover(open=open_subject, elsewhere=nowhere, updates=updates, **more)


# What is sound, but special.


class OnlyFloat32(nn.Module):
    """A kernel that is there for one format only."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("OnlyFloat32 is for float32")
        return x


class Unused(nn.Module):
    """A parameter whose gradient is 0 but for rounding, in a sum that cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift) * 1.1 - self.shift * 1.1


class Tokens(torch.utils.data.Dataset[Tensor]):
    """48 sequences of 5 to 8 tokens."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(1, 50, (5 + index % 4,), generator=torch.Generator().manual_seed(index))


def with_labels(samples: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class NextToken(Task):
    """The loss as the model gives it, with the number of labels that it is a mean over."""

    shift = 1

    def inputs(self, batch: Any) -> Any:
        return batch

    def weight(self, batch: Any) -> Any:
        return (batch["labels"][:, self.shift :] != -100).sum()

    def loss(self, output: Any, batch: Any) -> Any:
        return Loss.of_mean(output.loss, self.weight(batch))


class Translate(NextToken):
    shift = 0


def of_transformers(architecture: str) -> Run:
    """A tiny Llama or T5 with random weights, dropout and padding."""
    import transformers

    size = {"vocab_size": 50}

    def llama() -> nn.Module:
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **shape, attention_dropout=0.1))

    def t5() -> nn.Module:
        shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, **shape, dropout_rate=0.1))

    model, task = (llama, NextToken) if architecture == "llama" else (t5, Translate)
    return Run(model=model, task=task, dataset=Tokens, collate=lambda: with_labels)


# What is wrong, one class or function each.


class MeanOfMeans(Classify):
    def loss(self, output: Any, batch: Any) -> Any:
        return functional.cross_entropy(output, batch["labels"])


class SampleSizeWrong(Classify):
    """The mean is over samples, but the weight counts the longest sequence's tokens."""

    def weight(self, batch: Any) -> float:
        return batch["tokens"].numel()


class OverAccumulation(Classify):
    """Divided by how many micro-batches make a global batch."""

    def loss(self, output: Any, batch: Any) -> Any:
        steps = GLOBAL / len(output)
        return functional.cross_entropy(output, batch["labels"], reduction="sum") / steps


class TokensOfRank(Classify):
    """Divided by the tokens of this rank's micro-batch, times a guess of how many there are."""

    def loss(self, output: Any, batch: Any) -> Any:
        tokens = (batch["tokens"] != 0).sum()
        return functional.cross_entropy(output, batch["labels"], reduction="sum") / tokens * 40


class Contrastive(Classify):
    """Negatives of the same batch."""

    def loss(self, output: Any, batch: Any) -> Any:
        likeness = output @ output.T
        return functional.cross_entropy(likeness, torch.arange(len(output)), reduction="sum")


class Auxiliary(Classify):
    """Adds a term that is a mean, once for each batch."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch) + output.logsumexp(1).square().mean()


class SmoothedOverBatch(Classify):
    """Labels are smoothed towards how often each is in the batch."""

    def loss(self, output: Any, batch: Any) -> Any:
        target = functional.one_hot(batch["labels"], 3).to(output.dtype)
        target = 0.5 * target + 0.5 * target.mean(0)
        return -(target * output.log_softmax(1)).sum()


class CountedAfterMasking(Classify):
    """A mean over what the forward has not masked, and a weight that counts everything."""

    def loss(self, output: Any, batch: Any) -> Any:
        kept = batch["labels"] != 0
        return Loss.of_mean(functional.cross_entropy(output[kept], batch["labels"][kept]), kept.sum())


class RunningScale(Classify):
    """Divides by the largest loss seen so far."""

    largest = 1.0

    def loss(self, output: Any, batch: Any) -> Any:
        loss = super().loss(output, batch)
        self.largest = max(self.largest, float(loss))
        return loss / self.largest


class OwnDropout(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) > 0.3)


class NumpyDropout(nn.Module):
    """Draws from numpy's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(*x.shape) > 0.3)


class OwnNumpyDropout(nn.Module):
    """Draws from a generator of numpy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(self.rng.random(x.shape) > 0.3)


class Bank(nn.Module):
    """Goes by the samples that it has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque(maxlen=16)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.stack(list(self.queue)).mean(0) if self.queue else 0.0
        self.queue.extend(x.detach())
        return x - 0.1 * mean


class RunningMax(nn.Module):
    """Divides by the largest value seen so far, in a buffer that no checkpoint holds."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, 3 * x.detach().abs().max()))
        return x / self.largest


class Counter(nn.Module):
    """Goes by how often it was called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.05 * self.calls)


class Centre(nn.Module):
    """Subtracts the mean of the micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Clock(nn.Module):
    """Goes by the time."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-3 * (time.perf_counter_ns() % 1000))


class Unseeded(nn.Module):
    """A parameter that no seed reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.from_numpy(np.random.default_rng().random(8)).float())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class TiedByCopy(Net):
    """The head is made of a copy of the embedding that was taken at the first call."""

    tied: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tied is None:
            self.tied = self.embed.weight.detach().clone()[1:9]
        return super().forward(tokens) + self.embed(tokens).sum(1) @ self.tied[:, :3]


class CountsPadding(Net):
    """Averages over padding as well."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens)).mean(1)))


def noisy(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Leaves out tokens by chance, for all samples of a micro-batch at once."""
    batch = padded(samples)
    batch["tokens"][:, 1:] *= torch.rand(batch["tokens"][:, 1:].shape) > 0.2
    return batch


class CountingNoise:
    """A collate function that draws from a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        batch = padded(samples)
        batch["tokens"][:, 0] = self.random.randrange(1, 11)
        return batch


class RememberingWords(Words):
    """A sample is another each time that it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        tokens, label = super().__getitem__(index)
        return (tokens + self.reads) % 10 + 1, label


class SlowWeights(torch.optim.SGD):
    """Keeps slow weights where nobody saves them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for one, slow in zip(group["params"], self.slow, strict=True):
                slow.lerp_(one.detach().to(slow.dtype), 0.5)
                one.data.copy_(slow)


class TurnsDown(Hook):
    """Lowers the learning rate after three updates, which it counts by itself."""

    def __init__(self) -> None:
        self.count = 0

    def after_update(self, event: Any) -> None:
        self.count += 1
        if self.count == 3:
            for group in self.trainer.optimizer.param_groups:
                group["lr"] *= 0.1


class StatefulRates(evenstep.optim.schedules.LrSchedule):
    """Goes by how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, update: int, updates: int | None) -> float:
        self.asked += 1
        return 1 / (1 + 0.1 * self.asked)

    def check(self, updates: int | None) -> None: ...


def hooked() -> nn.Module:
    """A gradient that is scaled by hand, by its own size."""
    net = Net()
    net.mix.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))
    return net


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SlowWeights(model.parameters())


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A run with one fault.

    Args:
        rows: those that fail, at least.
        part: that the first of them names as the first that differs.
    """

    run: Run
    rows: tuple[str, ...]
    part: str


def mutant(*rows: str, part: str, **wrong: Any) -> Mutant:
    return Mutant(run=Run(**wrong), rows=rows, part=part)


def inner(module: Callable[[], nn.Module], *rows: str, part: str) -> Mutant:
    return mutant(*rows, part=part, model=lambda: Net(module))


LOSSES: dict[str, Mutant] = {
    "mean of means": mutant("loss", "cuts 4", part="the loss of micro-batch 0", task=MeanOfMeans),
    "sample size": mutant("cuts 4", part="the weight", task=SampleSizeWrong),
    "loss over accumulation": mutant("loss", part="the loss of micro-batch 0", task=OverAccumulation),
    "tokens of a rank": mutant("loss", part="the loss of micro-batch 0", task=TokensOfRank),
    "in-batch negatives": mutant("loss", "cuts 2", part="the loss of micro-batch 0", task=Contrastive),
    "auxiliary mean": mutant("loss", part="the loss of micro-batch 0", task=Auxiliary),
    "smoothing over the batch": mutant("cuts 4", part="the loss", task=SmoothedOverBatch),
    "counted after masking": mutant("loss", part="the loss of micro-batch 0", task=CountedAfterMasking),
    "running scale": mutant("cuts 4", "resume", part="the loss", task=RunningScale),
}
MODULES: dict[str, Mutant] = {
    "BatchNorm": inner(lambda: nn.BatchNorm1d(8), "cuts 4", part="module `inner`"),
    "own generator": inner(OwnDropout, "resume", part="`model.inner.generator`"),
    "numpy's generator": inner(NumpyDropout, "cuts 4", part="module `inner`"),
    "own generator of numpy": inner(OwnNumpyDropout, "resume", part="`model.inner.rng`"),
    "memory bank": inner(Bank, "cuts 4", "resume", part="module `inner`"),
    "running max": inner(RunningMax, "cuts 4", "resume", part="module `inner`"),
    "buffer by micro-batch": inner(Counter, "cuts 4", part="module `inner`"),
    "centred batch": inner(Centre, "cuts 4", part="module `inner`"),
    "time": inner(Clock, "again", part="module `inner`"),
    "unseeded parameter": inner(Unseeded, "again", part="parameter `inner.scale`"),
    "tied by a copy": mutant("resume", part="`model.tied`", model=TiedByCopy),
    "padding counts": mutant("cuts 4", part="the model", model=CountsPadding),
    "gradient scaled by hand": mutant("cuts 4", part="the gradient of", model=hooked),
}
AROUND: dict[str, Mutant] = {
    "chance in collate": mutant("cuts 4", part="the batch", collate=lambda: noisy),
    "own chance in collate": mutant("resume", part="the batch", collate=CountingNoise),
    "dataset that remembers": mutant("resume", part="`data._dataset.reads`", dataset=RememberingWords),
    "optimizer's own weights": mutant("resume", part="`optimizer.slow", optimizer=slow_sgd),
    "hook with a count": mutant("resume", part="`hook TurnsDown.count`", hooks=lambda: [TurnsDown()]),
    "stateful LR schedule": mutant("resume", part="`lr_schedule.asked`", schedule=StatefulRates),
}
MUTANTS = LOSSES | MODULES | AROUND
