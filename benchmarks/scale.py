"""What grows with the dataset, the model, its micro-batches and the length of a run, and what does not.

Starts are measured up to the first batch, in the midst of an epoch, and up to the end of a trainer's first update;
`ratio` is the share of the limit that they take in processor time, `wall` that by the clock on the wall. Updates are
measured beside the loop tuned by hand as in `overhead`: `ratio` is evenstep's processor time divided by the mean of two
copies of that loop, in the same round, the median over rounds. The store of metrics is fed those of a million updates;
`ratio` is the most memory that it takes in the last quarter of them, divided by the most in the second quarter.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first
from torch import Tensor, nn  # noqa: E402

from contenders.bare import train_tuned  # noqa: E402
from contenders.evenstep_ import Classify  # noqa: E402
from contenders.evenstep_ import train as train_evenstep  # noqa: E402
from evenstep import MapData, Mixture, Trainer  # noqa: E402
from evenstep.data import Position, ReadOptions, Sampled  # noqa: E402
from evenstep.events import Storage  # noqa: E402
from harness.rounds import Train, chunk_of, interleave  # noqa: E402
from harness.row import Row, Times, compared, mean_of, read_rows, table, write_rows  # noqa: E402
from harness.work import LOSS_EVERY_UPDATES, Work  # noqa: E402

RESULTS = HERE / "results" / "scale.json"
TUNED, AGAIN, EVENSTEP = "tuned by hand", "tuned by hand, again", "evenstep"
SAMPLES = (10**6, 10**9, 10**12)
START_MS, START_MB, STARTS = 50.0, 1.0, 21
BATCH = 1024
UPDATE_BOUND, CHUNK_S, ROUNDS = 1.10, 0.03, 40
SIZES = ((10, 1), (100, 1), (1000, 1), (10_000, 1), (10, 16), (10, 256), (1000, 16))  # tensors, micro-batches
UPDATES, METRICS = 1_000_000, ("train/loss", "train/grad_norm", "train/lr")
FLAT = 1.02


def power(number: int) -> str:
    """A power of ten in words.

    >>> power(1000)
    '10^3'
    """
    return f"10^{len(str(number)) - 1}"


def within(case: str, num_samples: int, values: Times, unit: str, *, limit: float) -> Row:
    """A figure of a dataset, measured several times, as a share of its limit."""
    lower, middle, upper = statistics.quantiles(values.cpu_s, n=4, method="inclusive")
    return Row(
        case=f"{case}, of {limit:g} {unit}",
        contender=f"{EVENSTEP}, {power(num_samples)} samples",
        median=middle,
        unit=unit,
        ratio=middle / limit,
        spread=(upper - lower) / limit,
        wall_ratio=statistics.median(values.wall_s) / limit,
        bound=1.0,
    )


def times_ms(start: Callable[[int], None], num_samples: int) -> Times:
    """How long starts take, in ms; one more comes first, after which caches are filled."""
    times = Times([], [])
    for number in range(STARTS + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        start(num_samples)
        if number:
            times.cpu_s.append((time.process_time() - cpu) * 1e3)
            times.wall_s.append((time.perf_counter() - wall) * 1e3)
    return times


def first_batch(num_samples: int) -> None:
    """From the dataset to the numbers and data of a batch in the midst of an epoch."""
    data = MapData(range(num_samples), global_batch_size=BATCH)
    next(data.batches(ReadOptions(start=Position(epoch=1, batch=num_samples // BATCH // 2), seed=1)))


def mixture_at(update: int) -> None:
    """From a mixture's saved state to its first batch after `update`."""
    sizes = {"long": 10**9, "short": 10**5}
    data = {name: MapData(range(size), global_batch_size=BATCH) for name, size in sizes.items()}
    mixture, position = Mixture(data, mixing=Sampled(weights={"long": 1.0, "short": 1.0})), Position(batch=update)
    places = {"long": [0, update // 2], "short": [update // 200, 0]}
    state = {"seed": 1, "position": list(position), "number": update, "places": places, "ended": ["short"]}
    mixture.load_state_dict(state)
    next(mixture.batches(ReadOptions(start=position, seed=1)))


def memory_mb(num_samples: int) -> Times:
    """The most that a first batch takes, which no other process changes."""
    tracemalloc.start()
    first_batch(num_samples)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Times([most / 1e6] * 2, [most / 1e6])


def starts() -> list[Row]:
    """Time and memory of a start."""
    time_of = partial(within, "to the first batch: time", unit="ms", limit=START_MS)
    memory_of = partial(within, "to the first batch: memory", unit="MB", limit=START_MB)
    run_of = partial(within, "a trainer and its first update: time", unit="ms", limit=START_MS)
    return [
        *(time_of(number, times_ms(first_batch, number)) for number in SAMPLES),
        *(memory_of(number, memory_mb(number)) for number in SAMPLES),
        *(run_of(number, times_ms(one_update, number)) for number in SAMPLES),
        within("a mixture resumed at update 10^6: time", 10**9, times_ms(mixture_at, 10**6), "ms", limit=START_MS),
    ]


class Numbers(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """So many samples, made when they are read."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), index % 7 / 7), torch.tensor(index % 3)


def one_update(num_samples: int) -> None:
    """Build a trainer, and train for one update."""
    model = nn.Linear(4, 3)
    Trainer(
        model=model,
        task=Classify(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=MapData(Numbers(num_samples), global_batch_size=8),
        updates=1,
        device="cpu",
    ).train()


class SideBySide(nn.Module):
    """The mean of many small layers side by side, each with a weight and a bias, so that no gradient vanishes."""

    def __init__(self, tensors: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(tensors // 2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([layer(inputs) for layer in self.layers]).tanh().mean(0)


def side_by_side(tensors: int, num_microbatches: int) -> Work:
    """A model of so many parameter tensors, with batches of 8."""
    torch.manual_seed(0)
    model = SideBySide(tensors)
    inputs = [torch.randn(8, 8) for _ in range(16)]
    parts = "micro-batch" if num_microbatches == 1 else "micro-batches"
    return Work(
        name=f"{tensors} tensors, {num_microbatches} {parts}",
        model=model,
        batches=[(one, one.argmax(1)) for one in inputs],
        num_microbatches=num_microbatches,
    )


def updates(tensors: int, num_microbatches: int) -> list[Row]:
    """An update beside the loop tuned by hand."""
    torch.set_num_threads(1)
    work = side_by_side(tensors, num_microbatches)
    contenders: dict[str, Train] = {TUNED: train_tuned, AGAIN: train_tuned, EVENSTEP: train_evenstep}
    chunk = chunk_of(train_tuned, work, seconds=CHUNK_S, multiple=1)
    if chunk > LOSS_EVERY_UPDATES // 2:  # whole periods of reading the loss, where updates are short
        chunk = -(-chunk // LOSS_EVERY_UPDATES) * LOSS_EVERY_UPDATES
    times = interleave(contenders, work, chunk_updates=chunk, rounds=ROUNDS)
    reference = mean_of(times[TUNED], times[AGAIN])
    return [
        compared(
            work.name,
            contender,
            one,
            reference,
            unit="us/update",
            per_s=1e6 / chunk,
            bound=UPDATE_BOUND if contender == EVENSTEP else None,
        )
        for contender, one in times.items()
    ]


def store() -> list[Row]:
    """Memory of the store of metrics over a million updates."""
    value = torch.tensor(0.5)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    storage = Storage()
    most: list[float] = []
    for quarter in range(4):
        tracemalloc.reset_peak()
        for update in range(quarter * UPDATES // 4 + 1, (quarter + 1) * UPDATES // 4 + 1):
            for name in METRICS:
                storage.put(name, value, 2.0, update=update)
            if update % LOSS_EVERY_UPDATES == 0:
                storage.settle()
        most.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    growth = most[3] / most[1]
    return [
        Row(
            case=f"metrics of {power(UPDATES)} updates: memory of the last quarter over that of the second",
            contender=EVENSTEP,
            median=most[3] / 1e6,
            unit="MB",
            ratio=growth,
            spread=0.0,
            wall_ratio=growth,
            bound=FLAT,
        )
    ]


PARTS: dict[str, Callable[[], list[Row]]] = {
    "starts": starts,
    **{f"{tensors}x{parts}": partial(updates, tensors, parts) for tensors, parts in SIZES},
    "store": store,
}


def main() -> list[Row]:
    """Run all parts, each in a process of its own, print the table and write results/scale.json."""
    rows: list[Row] = []
    for name in PARTS:
        print(f"{name} …", flush=True)
        rows += in_process(name)
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


def in_process(name: str) -> list[Row]:
    """The rows of one part."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--out", str(out)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return read_rows(out)


def one_part() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description="Measure one part; see benchmarks/run.py for all.")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_rows(arguments.out, PARTS[arguments.part]())


if __name__ == "__main__":
    one_part()
