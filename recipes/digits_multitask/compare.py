"""Trains the three tasks together, alone, and with PCGrad, and compares them: `python compare.py`.

Settings were chosen on the training images alone (`--choose`): four fifths train, the rest is evaluated. Without it all
training images train, and the test images are evaluated. All runs make the same number of updates with the same batches
of each task, and runs of one seed start from the same parameters; a run of one task leaves the other heads as they are.
It prints the mean over seeds, and exits 1 if the tasks together do worse than alone by more than the margins.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import torch

from evenstep import Training

sys.path.insert(0, str(Path(__file__).parent))

from digits import Label, Split, digits
from model import SharedNet

from evenstep import MapData, Mixture, Trainer
from evenstep.contrib.multitask import PcGrad
from evenstep.optim.schedules import Cosine
from evenstep.train import Combine
from tasks import Classify, Enclose, OfHead

SIZES: dict[Label, int] = {"class": 32, "parity": 32, "box": 16}
METRICS = {"class": "accuracy", "parity": "accuracy", "box": "error_px"}
MARGINS = {"class": 0.010, "parity": 0.010, "box": 0.25}  # two shares, and pixels
SEEDS = (0, 1, 2)
BOX_COEFFICIENTS = (1.0, 2.0, 4.0)  # to choose from
BOX_COEFFICIENT = 1.0

Values = dict[str, list[float]]


def train(
    labels: Sequence[Label],
    updates: int,
    combine: Combine | None = None,
    *,
    seed: int = 0,
    box: float = BOX_COEFFICIENT,
    splits: tuple[Split, Split] = ("train", "test"),
) -> dict[str, float]:
    """The metric of each of the tasks after training them together.

    Args:
        labels: the tasks.
        updates: how many.
        combine: what is made of their separate gradients.
        seed: of parameters, order and dropout.
        box: the coefficient of that task beside others.
        splits: what is trained on, and what is evaluated.
    """
    torch.manual_seed(seed)
    model = SharedNet()
    tasks: dict[str, OfHead] = {label: (Enclose if label == "box" else Classify)(label) for label in labels}
    test = {label: MapData(digits(splits[1], label), global_batch_size=400, shuffle=False) for label in labels}
    trainer = Trainer(
        model=model,
        task=tasks,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, fused=True),
        data=Mixture(
            {label: MapData(digits(splits[0], label, max_shift=1), global_batch_size=SIZES[label]) for label in labels}
        ),
        updates=updates,
        seed=seed,
        device="cpu",
        lr_schedule=Cosine(warmup_updates=min(50, updates), end_factor=0.05),
        train=Training(clip_norm=2.0, coefficients={"box": box} if len(labels) > 1 else None, combine=combine),
        evaluations={"test": Mixture(test, end="max")},
    )
    trainer.train()
    metrics = trainer.evaluate("test")["test"]
    return {label: metrics[f"{label}/{METRICS[label]}"] for label in labels}


def compare(
    updates: int, seeds: Sequence[int], boxes: Sequence[float], splits: tuple[Split, Split]
) -> dict[str, Values]:
    """Each way's metrics, by seed."""
    rows: dict[str, Values] = {}

    def add(name: str, values: dict[str, float]) -> None:
        for label, value in values.items():
            rows.setdefault(name, {}).setdefault(label, []).append(value)

    for seed in seeds:
        for label in SIZES:
            add("alone", train([label], updates, seed=seed, splits=splits))
        for box in boxes:
            name = "together" if len(boxes) == 1 else f"together, box × {box:g}"
            add(name, train(list(SIZES), updates, seed=seed, box=box, splits=splits))
        add("together, PCGrad", train(list(SIZES), updates, PcGrad(), seed=seed, splits=splits))
    return rows


def worse_by(label: str, one: float, other: float) -> float:
    """How much worse `one` is than `other`; an error is better when small."""
    return one - other if METRICS[label].startswith("error") else other - one


def main() -> int:
    parser = argparse.ArgumentParser(description="Three tasks together, alone, and with PCGrad.")
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--choose", action="store_true", help="on held-out training images, for several coefficients")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    boxes = BOX_COEFFICIENTS if arguments.choose else (BOX_COEFFICIENT,)
    splits: tuple[Split, Split] = ("fit", "valid") if arguments.choose else ("train", "test")
    rows = compare(arguments.updates, arguments.seeds, boxes, splits)
    print(f"{'':<20}" + "".join(f"{f'{label} {METRICS[label]}':>22}" for label in SIZES))
    for name, values in rows.items():
        spread = {label: stdev(some) if len(some) > 1 else 0.0 for label, some in values.items()}
        print(f"{name:<20}" + "".join(f"{f'{mean(values[one]):.4f} ± {spread[one]:.4f}':>22}" for one in SIZES))
    if arguments.choose:
        return 0
    failed = [
        f"{label}: {mean(rows[name][label]):.4f} {name} against {mean(rows['alone'][label]):.4f} alone, margin "
        f"{MARGINS[label]:g}"
        for name in rows
        for label in SIZES
        if worse_by(label, mean(rows[name][label]), mean(rows["alone"][label])) > MARGINS[label]
    ]
    print("\n".join(failed) or f"together at least as good as alone, within {MARGINS}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
