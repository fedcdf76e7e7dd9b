"""The same global batches, cut in different ways, against one plain PyTorch batch in float64.

The reference shares no code with the engine: it walks the samples in order, stacks each global batch whole, divides
the summed loss by the number of valid tokens, clips, and steps torch's own optimizer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import evenstep
from evenstep.optim.schedules import Cosine
from rows.row import Row

SAMPLES, GLOBAL_BATCH, LENGTH, WORDS = 92, 32, 12, 11  # 92 = 2 × 32 + 28: the last global batch of an epoch is short
UPDATES, WARMUP, CLIP = 24, 5, 0.05
IGNORED = -100


def samples() -> list[tuple[Tensor, Tensor]]:
    """Sentences of 1 to 12 words; of samples 8 to 11 every word is ignored, so a micro-batch of 4 may weigh 0."""
    generator = torch.Generator().manual_seed(0)
    made: list[tuple[Tensor, Tensor]] = []
    for number in range(SAMPLES):
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        targets = torch.randint(WORDS, (LENGTH,), generator=generator)
        valid = 0 if 8 <= number < 12 else int(torch.randint(1, LENGTH + 1, (), generator=generator))
        targets[valid:] = IGNORED
        made.append((words, targets))
    return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, WORDS)).double()


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Words(evenstep.Task):
    """Weighs valid tokens."""

    def weight(self, batch: Any) -> Tensor:
        return (batch[1] != IGNORED).sum()

    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        return evenstep.Loss(loss_sum(output, batch[1]))


class LateWords(evenstep.Task):
    """The same, but the weight is known only after the forward."""

    late_weight = True

    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        return evenstep.Loss(loss_sum(output, batch[1]), weight=(batch[1] != IGNORED).sum())


Build = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=3e-3)


def reference(build: Build) -> Tensor:
    """The parameters after UPDATES updates of a loop as one would write it for one batch that fits."""
    trained, data = model(), samples()
    optimizer = build(trained)
    bases = [group["lr"] for group in optimizer.param_groups]
    begins = [*range(0, SAMPLES, GLOBAL_BATCH)]
    for update in range(1, UPDATES + 1):
        begin = begins[(update - 1) % len(begins)]
        batch = data[begin : begin + GLOBAL_BATCH]
        words, targets = (torch.stack([sample[part] for sample in batch]) for part in (0, 1))
        if update <= WARMUP:
            factor = update / WARMUP
        else:
            factor = 0.1 + 0.9 * (1 + math.cos(math.pi * (update - WARMUP) / (UPDATES - WARMUP))) / 2
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * factor
        optimizer.zero_grad()
        (loss_sum(trained(words), targets) / (targets != IGNORED).sum()).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        optimizer.step()
    return flat(trained)


def flat(trained: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A way of cutting the same global batches."""

    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    task: type[evenstep.Task] = Words
    build: Build = adamw
    precision: evenstep.precision.Precision | None = None

    def difference(self) -> tuple[float, float]:
        """‖θ - θ_reference‖₂ / ‖θ_reference‖₂ after the last update, and its bound."""
        data = samples()
        lengths = [max(1, int((targets != IGNORED).sum())) for _, targets in data]
        trained = model()
        trainer = evenstep.Trainer(
            model=trained,
            task=self.task(),
            optimizer=self.build(trained),
            data=evenstep.MapData(
                data,
                global_batch_size=GLOBAL_BATCH,
                micro_batch_size=self.micro_batch_size,
                micro_batch_tokens=self.micro_batch_tokens,
                lengths=lengths if self.micro_batch_tokens else None,
                shuffle=False,
            ),
            updates=UPDATES,
            device="cpu",
            lr_schedule=Cosine(warmup_updates=WARMUP, end_factor=0.1),
            train=evenstep.Training(clip_norm=CLIP),
            precision=self.precision,
        )
        trainer.train()
        wanted = reference(self.build)
        return float((flat(trained) - wanted).norm() / wanted.norm()), 1e-12


def sgd(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained.parameters(), lr=0.5, momentum=0.9)


def fused_adamw(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=3e-3, fused=True)


CUTS = {
    "1 × 32": Cut(micro_batch_size=32),
    "4 × 8": Cut(micro_batch_size=8),
    "8 × 4 (a weight-0 micro-batch)": Cut(micro_batch_size=4),
    "32 × 1 (four weight-0 micro-batches)": Cut(micro_batch_size=1),
    "5 × 7 (the last one short)": Cut(micro_batch_size=7),
    "unequal token counts (≤ 24 padded tokens)": Cut(micro_batch_tokens=24),
    "late weight, 4 × 8": Cut(micro_batch_size=8, task=LateWords),
    "late weight, 8 × 4 (a weight-0 micro-batch)": Cut(micro_batch_size=4, task=LateWords),
    "fused AdamW, 4 × 8": Cut(micro_batch_size=8, build=fused_adamw),
    "SGD with momentum, 4 × 8": Cut(micro_batch_size=8, build=sgd),
    "SGD, late weight, unequal token counts": Cut(micro_batch_tokens=24, task=LateWords, build=sgd),
}


ROWS = [
    Row(name=f"cut {name}", measure="relative difference to one float64 batch", run=partial(Cut.difference, cut))
    for name, cut in CUTS.items()
]
