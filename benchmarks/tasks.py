"""What an update of three tasks costs on two ranks, beside a loop by hand that accumulates three backwards.

The loop by hand has one flat tensor of gradients, into which all backwards add, and sums it over ranks with one
all-reduce. `ratio` is evenstep's time per update divided by its, in the same round, the median over rounds; times are
processor time, the mean of both ranks. There are two copies of the loop: half the spread of one against the other, how
far they typically are apart in a round, is added to the bound. Both must end at the same parameters within 1e-5. How
often each gives gradients to an all-reduce is counted too: exactly one round per update.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from evenstep import Logging, Training

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

from evenstep import Task, Trainer, UpdateData  # noqa: E402
from evenstep.parallel import Ddp, Processes  # noqa: E402
from harness.feed import Feed  # noqa: E402
from harness.ranks import on_ranks, one_rank, over_ranks, sent  # noqa: E402
from harness.rounds import Train, chunk_of, interleave  # noqa: E402
from harness.row import Row, compared, mean_of, table, write_rows  # noqa: E402
from harness.work import CLIP_NORM, LOSS_EVERY_UPDATES, Block, Work, mean_loss, summed_loss  # noqa: E402

RESULTS = HERE / "results" / "tasks.json"
BY_HAND, AGAIN, EVENSTEP = "by hand", "by hand, again", "evenstep"
RANKS, BOUND, ROUNDS, COUNTED_UPDATES = 2, 1.02, 40, 3
CLASSES = {"a": 10, "b": 2, "c": 50}
NAMES = list(CLASSES)
PER_UPDATE = RANKS * len(NAMES)  # micro-batches; each rank runs one of every task


class ThreeHeads(nn.Module):
    """A small transformer with a head per task, of which a batch runs one."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(layers)])
        self.heads = nn.ModuleList([nn.Linear(width, count) for count in CLASSES.values()])

    def forward(self, tokens: Tensor, head: int) -> Any:
        return self.heads[head](self.blocks(self.bytes(tokens)).mean(1))


def three_tasks() -> Work:
    """Batches of the three tasks in turn, 16 × 64 bytes each."""
    torch.manual_seed(0)
    model = ThreeHeads()
    batches: list[tuple[Tensor, Tensor]] = []
    for number in range(4 * PER_UPDATE):
        text = torch.randint(0, 256, (16, 64))
        batches.append((text, text.sum(1) % CLASSES[NAMES[number % len(NAMES)]]))
    return Work(
        name=f"3 tasks, transformer 3 × 128, {RANKS} ranks", model=model, batches=batches, num_microbatches=PER_UPDATE
    )


def by_hand(model: nn.Module, feed: Feed, work: Work, *, rank: int) -> list[float]:
    """Three backwards into one flat gradient, one all-reduce."""
    optimizer = work.optimizer(model)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    losses: list[float] = []
    running: Tensor | None = None
    for number, (tokens, classes) in enumerate(feed):
        place = number % PER_UPDATE
        if place // len(NAMES) == rank:
            loss = mean_loss(model(tokens, place % len(NAMES)), classes) / RANKS
            loss.backward()
            running = loss.detach() if running is None else running + loss.detach()
        if place == PER_UPDATE - 1:
            dist.all_reduce(flat)
            clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            flat.zero_()
            if (number + 1) % (LOSS_EVERY_UPDATES * PER_UPDATE) == 0:
                losses.append(float(running) / LOSS_EVERY_UPDATES if running is not None else 0.0)
                running = None
    return losses or [0.0]


class OfHead(Task):
    """The classes of one head."""

    def __init__(self, head: int) -> None:
        self.head = head

    def inputs(self, batch: Any) -> Any:
        return {"tokens": batch[0], "head": self.head}

    def loss(self, output: Any, batch: Any) -> Tensor:
        return summed_loss(output, batch[1])


class Updates:
    """The feed, an update's batches at a time, with the names of their tasks."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        some: list[Any] = []
        for batch in self._feed:
            some.append((batch, NAMES[len(some) % len(NAMES)]))
            if len(some) == PER_UPDATE:
                yield tuple(some)
                some = []


def with_evenstep(model: nn.Module, feed: Feed, work: Work, *, group: Processes) -> list[float]:
    trainer = Trainer(
        model=model,
        task={name: OfHead(head) for head, name in enumerate(NAMES)},
        optimizer=work.optimizer(model),
        data=UpdateData(Updates(feed)),
        updates=feed.num_batches // PER_UPDATE,
        device="cpu",
        strategy=Ddp(group),
        train=Training(clip_norm=CLIP_NORM),
        log=Logging(every_updates=LOSS_EVERY_UPDATES),
    )
    trainer.train()
    return [record.value for record in trainer.storage.history("train/loss")]


def measure(group: Processes, rounds: int) -> list[Row]:
    """All contenders on this rank; all ranks get the same rows."""
    work = three_tasks()
    hand = partial(by_hand, rank=group.rank)
    contenders: dict[str, Train] = {BY_HAND: hand, AGAIN: hand, EVENSTEP: partial(with_evenstep, group=group)}
    chunk = group.gather(chunk_of(hand, work, seconds=0.03, multiple=1))[0]
    times = over_ranks(group.gather(interleave(contenders, work, chunk_updates=chunk, rounds=rounds)))
    row = partial(compared, work.name, unit="us/update", per_s=1e6 / chunk)
    reference = mean_of(times[BY_HAND], times[AGAIN])
    noise = row("", times[AGAIN], times[BY_HAND]).spread
    rows = [
        row(name, one, reference, bound=BOUND + noise / 2 if name == EVENSTEP else None) for name, one in times.items()
    ]
    return rows + _reductions(contenders, work)


def _reductions(contenders: Mapping[str, Train], work: Work) -> list[Row]:
    """Rounds of gradient reduction per update: bytes given to all-reduces over those of all gradients."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in work.model.parameters())
    rows: list[Row] = []
    for name in (BY_HAND, EVENSTEP):
        rounds = sent(name, contenders[name], work, COUNTED_UPDATES)["allreduce", torch.float32] / size
        bound = 1.0 if name == EVENSTEP else None
        case = f"{work.name}: rounds of gradient reduction"
        rows.append(
            Row(
                case=case,
                contender=name,
                median=rounds,
                unit="/update",
                ratio=rounds,
                spread=0.0,
                wall_ratio=rounds,
                bound=bound,
            )
        )
    return rows


def main(rounds: int = ROUNDS) -> list[Row]:
    """Run both ranks, print the table and write results/tasks.json."""
    print(f"3 tasks on {RANKS} ranks …", flush=True)
    rows = on_ranks(HERE / "tasks.py", ["--rounds", str(rounds)], ranks=RANKS)
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure on one rank; see benchmarks/run.py for all.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer, to try it")
    one_rank(parser, lambda group, arguments: measure(group, arguments.rounds))
