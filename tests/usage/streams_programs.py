"""Streams of all kinds, and a run on several ranks that is left and taken up."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import evenstep
from evenstep.data import Data

EPOCH = 12  # samples


def sample(number: int) -> tuple[Tensor, Tensor]:
    """A sample that tells its number."""
    return torch.full((4,), float(number)), torch.tensor(1.0)


class Counting:
    """`length` samples an epoch, others in each, from `first` on."""

    def __init__(self, length: int = EPOCH, first: int = 0, step: int = 1) -> None:
        self.length, self.first, self.step, self.next, self.epoch = length, first, step, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.length:
            self.next += self.step
            yield self.item(self.first + 100 * self.epoch + self.next - self.step)
        self.next = 0

    def item(self, number: int) -> Any:
        return sample(number)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Augmenting(Counting):
    """Adds noise from all three global generators."""

    def item(self, number: int) -> Any:
        inputs, target = sample(number)
        return inputs + torch.rand(4) * random.random() * np.random.rand() / 8, target


class LateState(Counting):
    """One that knows its state only once it is read."""

    began = False

    def __iter__(self) -> Iterator[Any]:
        self.began = True
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        if not self.began:
            raise RuntimeError("not iterated yet")
        return super().state_dict()


class Updates(Counting):
    """Two ready-made batches an update."""

    length = EPOCH

    def item(self, number: int) -> Any:
        return tuple(tuple(part[None] for part in sample(2 * number + more)) for more in range(2))


class PlainDataset(IterableDataset):  # type: ignore[type-arg]
    """An iterable dataset for loaders, divided between their workers, with a state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbers = range(start, EPOCH, step)
        while self.next < len(numbers):
            self.next += 1
            yield sample(numbers[self.next - 1])
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def _own(stream: Any, **options: Any) -> Data:
    return evenstep.StreamData(stream, global_batch_size=4, micro_batch_size=2, **options)


def _loader(dataset: Any, rank: int, **options: Any) -> Data:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(1000 + rank)  # from which a loader draws the seed of its order
    loader = StatefulDataLoader(dataset, batch_size=2, **options)
    return evenstep.StreamData(loader, batched=True, num_microbatches=2)


def _table() -> Any:
    return TensorDataset(torch.arange(float(EPOCH))[:, None].expand(EPOCH, 4).clone(), torch.ones(EPOCH))


def _rows() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"number": list(range(EPOCH))})


def _of_rows(rows: list[dict[str, int]]) -> list[Tensor]:
    return [torch.stack(parts) for parts in zip(*(sample(row["number"]) for row in rows), strict=True)]


def _split_by_node(rank: int, ranks: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(_rows().to_iterable_dataset(num_shards=3), rank, ranks)


STREAMS: dict[str, Callable[[int, int], Data]] = {
    "counting": lambda rank, ranks: _own(Counting()),
    "uneven": lambda rank, ranks: _own(Counting(length=EPOCH if rank == 0 else 5, first=1000 * rank)),
    "unlike": lambda rank, ranks: _own(Counting(length=EPOCH * (1 + rank), first=1000 * rank, step=1 + rank)),
    "empty_on_rank_1": lambda rank, ranks: _own(Counting(length=EPOCH if rank == 0 else 0)),
    "augmenting": lambda rank, ranks: _own(Augmenting()),
    "shared": lambda rank, ranks: _own(Augmenting(length=EPOCH - 1), shared=True),
    "updates": lambda rank, ranks: evenstep.UpdateData(Updates(length=6)),
    "late_state": lambda rank, ranks: _own(LateState()),
    "loader_of_map": lambda rank, ranks: _loader(_table(), rank),
    "loader_of_map_shuffled": lambda rank, ranks: _loader(_table(), rank, shuffle=True),
    "loader_of_iterable": lambda rank, ranks: _loader(PlainDataset(), rank),
    "workers_of_map": lambda rank, ranks: _loader(_table(), rank, num_workers=2),
    "workers_of_map_shuffled": lambda rank, ranks: _loader(_table(), rank, num_workers=2, shuffle=True),
    "workers_that_persist": lambda rank, ranks: _loader(
        _table(), rank, num_workers=2, shuffle=True, persistent_workers=True
    ),
    "workers_of_iterable": lambda rank, ranks: _loader(PlainDataset(), rank, num_workers=2),
    "hf_map": lambda rank, ranks: evenstep.MapData(_rows(), global_batch_size=4, micro_batch_size=2, collate=_of_rows),
    "hf_streaming": lambda rank, ranks: _own(_rows().to_iterable_dataset(num_shards=3), collate=_of_rows),
    "hf_split_by_node": lambda rank, ranks: _own(_split_by_node(rank, ranks), collate=_of_rows),
}


class Square(evenstep.Task):
    """May fail once, or give a gradient that is not finite once; `Watch` notes which samples it has trained on."""

    def __init__(self, *, fails_at: int = 0, spoils_at: int = 0) -> None:
        self.seen: list[float] = []
        self.update = 1
        self.fails_at, self.spoils_at = fails_at, spoils_at

    def loss(self, output: Tensor, batch: Any) -> Any:
        if self.update == self.fails_at:
            raise ValueError("a bug of the user's")
        if self.update == self.spoils_at:
            self.spoils_at = 0
            return (output * torch.inf).sum()
        return ((output.sum(-1) - batch[1]) ** 2).sum()


class Watch(evenstep.Hook):
    """Notes the samples of passes that count, stops where the run is to be left."""

    def __init__(self, task: Square, stop_at: int) -> None:
        self.task, self.stop_at = task, stop_at

    def before_update(self, event: Any) -> None:
        self.task.update = event.update

    def after_microbatch(self, event: Any) -> None:
        if event.loss is not None:
            self.task.seen += [round(one, 4) for one in event.batch[0][:, 0].tolist()]

    def after_update(self, event: Any) -> None:
        if event.update == 3:
            self.trainer.request_save()
        if event.update == self.stop_at:
            self.trainer.request_stop("left")


def train(folder: str, stream: str, strategy: str, what: str, leaving: dict[str, Any]) -> dict[str, Any]:
    """One run, or its part before or after it was left.

    Args:
        folder: of the run.
        stream: a key of `STREAMS`.
        strategy: by name.
        what: "fails", "skips" or "rewinds" in its fifth update, or nothing.
        leaving: `stop_at` an update; `resume`, whether from the folder.
    """
    from evenstep.train import FailurePolicy

    group = group_of_ranks(timeout_s=20)
    rank, ranks = (0, 1) if group is None else (group.rank, group.ranks)
    torch.manual_seed(0)
    model, data = nn.Linear(4, 4), STREAMS[stream](rank, ranks)
    task = Square(fails_at=5 if what == "fails" else 0, spoils_at=5 if what in ("skips", "rewinds") else 0)
    watch = Watch(task, leaving.get("stop_at", 0))
    trainer = evenstep.Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9, foreach=False),
        device="cpu",
        strategy=strategy_named(strategy, group),
        folder=folder,
        hooks=[watch],
        data=data,
        updates=10,
        failures=evenstep.Failures(non_finite="rewind" if what == "rewinds" else FailurePolicy("skip", limit=3)),
    )
    if leaving.get("resume"):
        trainer.resume("auto")
    error = ""
    try:
        trainer.train()
    except ValueError as raised:
        error = str(raised)
    except evenstep.EvenstepError as raised:
        if what != "fails":
            raise
        error = str(raised)
    result = {"seen": task.seen, "error": error, "progress": str(trainer.progress)}
    if not error:
        result["model"] = digest(trainer.state_dict()["model"])
    if group is not None and not error:
        group.close()
    return result
