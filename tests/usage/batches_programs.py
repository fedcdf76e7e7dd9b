"""What the battery of batches and losses trains: a linear classifier of what a kind of batch is read as."""

from collections.abc import Sequence
from typing import Any

import torch
from batches import CLASSES, FEATURES, GLOBAL, Kind, Sample, rows
from torch import Tensor, nn
from torch.nn import functional as F

import evenstep
from evenstep import Loss


class Reads(nn.Module):
    """A linear layer over what a batch is read as; there is memory to train on so many samples only."""

    def __init__(self, kind: Kind, room: int | None = None) -> None:
        super().__init__()
        self.kind, self.room = kind, room
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, batch: Any) -> Tensor:
        x, _ = self.kind.read(batch)
        if self.room is not None and len(x) > self.room and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no memory left (injected)")
        return self.linear(x)


class Classify(evenstep.Task):
    """Cross-entropy, given in one way or another."""

    def __init__(self, kind: Kind, loss: str = "sum") -> None:
        self.kind, self.how = kind, loss
        self.late_weight = "late weight" in loss

    def inputs(self, batch: Any) -> Any:
        return (batch,)

    def loss(self, output: Any, batch: Any) -> Any:
        y = self.kind.read(batch)[1].long()
        total, count = F.cross_entropy(output, y, reduction="sum"), len(y)
        mean = total / count
        given: dict[str, Any] = {
            "sum": lambda: total,
            "sum, several metrics": lambda: Loss(total, metrics={"right": ((output.argmax(-1) == y).sum(), count)}),
            "Loss.of_mean": lambda: Loss.of_mean(mean, count),
            "Loss.of_mean, late weight": lambda: Loss.of_mean(mean, torch.tensor(count)),
            "late weight": lambda: Loss(total, weight=count),
            "mean": lambda: mean,
            "mean, late weight": lambda: Loss(mean, weight=count),
            "one per sample": lambda: F.cross_entropy(output, y, reduction="none"),
            "in-batch negatives": lambda: F.cross_entropy(output @ output.t(), torch.arange(count), reduction="sum"),
            "a penalty once per batch": lambda: total + 2.5,
            "a weight of 1": lambda: total,
            "a count that is not the weight": lambda: Loss.of_mean(mean, 2 * count),
            "a float": lambda: total.item(),
            "a dict": lambda: {"loss": mean},
            "a tuple": lambda: (total, output),
            "None": lambda: None,
        }
        return given[self.how]()


class One(Classify):
    def weight(self, batch: Any) -> float:
        return 1.0


def task_of(kind: Kind, loss: str) -> Classify:
    return One(kind, loss) if loss == "a weight of 1" else Classify(kind, loss)


def trainer_of(
    kind: Kind,
    samples: Sequence[Sample],
    *,
    loss: str = "sum",
    micro: int | None = None,
    room: int | None = None,
    **more: Any,
) -> evenstep.Trainer:
    torch.manual_seed(1)
    model = Reads(kind, room)
    data = evenstep.MapData(
        samples, global_batch_size=GLOBAL, micro_batch_size=micro, shuffle=False, collate=kind.collate
    )
    return evenstep.Trainer(
        model=model,
        task=more.pop("task", None) or task_of(kind, loss),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data=data,
        updates=2,
        device="cpu",
        **more,
    )


def trained(kind: Kind, samples: Sequence[Sample], **how: Any) -> Tensor:
    """The parameters after two updates, as one vector."""
    trainer = trainer_of(kind, samples, **how)
    trainer.train()
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def reference(kind: Kind, samples: Sequence[Sample]) -> Tensor:
    """The same in plain PyTorch: the mean over the whole global batch."""
    torch.manual_seed(1)
    model = Reads(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, 2 * GLOBAL, GLOBAL):
        x, y = rows(samples[start : start + GLOBAL])
        optimizer.zero_grad()
        F.cross_entropy(model.linear(x), y).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()
