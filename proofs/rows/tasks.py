"""Several tasks in one update: K batches of each, on 1, 2 and 4 ranks, against one plain float64 batch per task.

The reference shares no code with the engine: it walks each task's samples in order, stacks each batch whole, divides
the sum by the weights, and steps torch's own optimizer once per update.
"""

import tempfile
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rows.cutting import flat
from rows.ranks import started
from rows.row import Row
from rows.tasked import COEFFICIENTS, LAST_OF_C, LATE, REPEATS, SAMPLES, SIZES, UPDATES, adamw, model, samples

SCRIPT = Path(__file__).with_name("tasked.py")


@cache
def reference() -> Tensor:
    """The parameters after UPDATES updates of a loop as one would write it."""
    trained = model()
    optimizer = adamw(trained)
    places = dict.fromkeys(SIZES, 0)
    data = {name: samples(place) for place, name in enumerate(SIZES)}
    for update in range(1, UPDATES + 1):
        optimizer.zero_grad()
        for name, size in SIZES.items():
            if name == "c" and update > LAST_OF_C:
                continue
            sums: list[Tensor] = []
            weights: list[Tensor] = []
            for _ in range(REPEATS[name]):
                batch = data[name][places[name] : places[name] + size]
                places[name] = (places[name] + size) % SAMPLES
                x, y, w = (torch.stack([sample[part] for sample in batch]) for part in range(3))
                sums.append((w * (trained(x, name) - y) ** 2).sum())
                weights.append(w.sum())
            (COEFFICIENTS[name] * torch.stack(sums).sum() / torch.stack(weights).sum()).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        optimizer.step()
    return flat(trained)


def run(folder: Path, strategy: str, ranks: int, updates: int, weights: str) -> list[str]:
    """Run all ranks to the end; the lines that rank 0 printed."""
    return started([str(SCRIPT), str(folder), strategy, str(updates), weights], ranks).split()


def difference(strategy: str, ranks: int, weights: str) -> tuple[float, float]:
    """‖θ - θ_reference‖₂ / ‖θ_reference‖₂ after the last update, and its bound."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), strategy, ranks, UPDATES, weights)
        found = torch.load(Path(folder) / "parameters.pt", weights_only=True)
    wanted = reference()
    return float((found - wanted).norm() / wanted.norm()), 1e-12


@cache
def straight() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), "ordered", 1, UPDATES, "per token")


def moved(*layouts: int) -> tuple[str, str]:
    """sha256 of a run that is stopped within the mixture's epoch and goes on with other ranks, and of one straight."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [UPDATES * (place + 1) // len(layouts) for place in range(len(layouts))]
        printed = [
            run(Path(folder), "ordered", ranks, end, "per token") for ranks, end in zip(layouts, ends, strict=True)
        ]
    return printed[-1][1], straight()[1]


def idle(ranks: int) -> tuple[str, str]:
    """sha256 of the idle head's parameters and optimizer state at the end, and at its last update with work."""
    with tempfile.TemporaryDirectory() as folder:
        before = run(Path(folder), "ddp", ranks, LAST_OF_C, "per token")[0]
        return run(Path(folder), "ddp", ranks, UPDATES, "per token")[0], before


LAYOUTS = {1: "single", 2: "ddp", 4: "ddp"}
ROWS = [
    *(
        Row(
            name=f"tasks {weights}, {ranks} rank{'s' if ranks > 1 else ''}",
            measure="relative difference to one float64 batch",
            run=partial(difference, strategy, ranks, weights),
        )
        for weights in LATE
        for ranks, strategy in LAYOUTS.items()
    ),
    *(
        Row(
            name=f"tasks {weights}, fsdp, 2 ranks",
            measure="relative difference to one float64 batch",
            run=partial(difference, "fsdp", 2, weights),
        )
        for weights in LATE
    ),
    Row(
        name="tasks, resumed mid-epoch on 2, 4, 1 ranks",
        measure="sha256 of all that training changes",
        run=partial(moved, 2, 4, 1),
    ),
    Row(name="tasks, an idle head", measure="sha256 of its parameters and state", run=partial(idle, 1)),
    Row(name="tasks, an idle head, 2 ranks", measure="sha256 of its parameters and state", run=partial(idle, 2)),
]
