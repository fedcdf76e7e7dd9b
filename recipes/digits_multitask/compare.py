"""Trains the three tasks together, alone, and with PCGrad, and compares them: `python compare.py`.

All runs make the same number of updates with the same batches of each task, from the same parameters; a run of one task
leaves the other heads as they are. It prints a table, and exits 1 if the tasks together do worse than alone by more
than the margins.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from digits import Label, digits
from model import SharedNet

from evenstep import MapData, Mixture, Trainer
from evenstep.optim.schedules import Cosine
from evenstep.train import Combine, PcGrad
from tasks import Classify, Enclose, OfHead

SIZES: dict[Label, int] = {"class": 32, "parity": 32, "box": 16}
METRICS = {"class": "accuracy", "parity": "accuracy", "box": "error_px"}
MARGINS = {"class": 0.010, "parity": 0.010, "box": 0.25}  # two shares, and pixels


def train(labels: Sequence[Label], updates: int, combine: Combine | None = None) -> dict[str, float]:
    """The metric of each of the tasks on the test images after training them together."""
    torch.manual_seed(0)
    model = SharedNet()
    tasks: dict[str, OfHead] = {label: (Enclose if label == "box" else Classify)(label) for label in labels}
    test = {label: MapData(digits("test", label), global_batch_size=400, shuffle=False) for label in labels}
    trainer = Trainer(
        model=model,
        task=tasks,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, fused=True),
        data=Mixture(
            {label: MapData(digits("train", label, max_shift=1), global_batch_size=SIZES[label]) for label in labels}
        ),
        updates=updates,
        device="cpu",
        lr_schedule=Cosine(warmup_updates=min(50, updates), end_factor=0.05),
        clip_norm=2.0,
        evaluations={"test": Mixture(test, end="max")},
        combine=combine,
    )
    trainer.train()
    metrics = trainer.evaluate("test")["test"]
    return {label: metrics[f"{label}/{METRICS[label]}"] for label in labels}


def worse_by(label: str, one: float, other: float) -> float:
    """How much worse `one` is than `other`; an error is better when small."""
    return one - other if METRICS[label].startswith("error") else other - one


def main() -> int:
    parser = argparse.ArgumentParser(description="Three tasks together, alone, and with PCGrad.")
    parser.add_argument("--updates", type=int, default=800)
    updates: int = parser.parse_args().updates
    torch.set_num_threads(1)
    rows = {
        "alone": {label: train([label], updates)[label] for label in SIZES},
        "together": train(list(SIZES), updates),
        "together, PCGrad": train(list(SIZES), updates, PcGrad()),
    }
    print(f"{'':<18}" + "".join(f"{f'{label} {METRICS[label]}':>18}" for label in SIZES))
    for name, values in rows.items():
        print(f"{name:<18}" + "".join(f"{values[label]:>18.4f}" for label in SIZES))
    failed = [
        f"{label}: {rows[name][label]:.4f} {name} against {rows['alone'][label]:.4f} alone, margin {MARGINS[label]:g}"
        for name in rows
        for label in SIZES
        if worse_by(label, rows[name][label], rows["alone"][label]) > MARGINS[label]
    ]
    print("\n".join(failed) or f"together at least as good as alone, within {MARGINS}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
