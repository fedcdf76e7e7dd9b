"""Compares the loss of every update with that of transformers' own Trainer: `python compare.py`.

Both train the recipe's Llama, in float64, on the same samples in the same order, packed in rows. Transformers divides
by all counted tokens of an update as well (`num_items_in_batch`), so its curve is right here; its cross-entropy is in
float32, which is why the curves agree to 1e-6 and not closer. Here each cut must give that curve: micro-batches of
other sizes, one row, rows of 128 tokens, or each sample in a row beside its padding. It exits 1 if one does not.
"""

import argparse
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from questions import PAD, Sample, questions, rows

from evenstep import Logging, MapData, Trainer, Training, Writer
from evenstep.events import Record
from evenstep.integrations.hf import CausalLM, Packing, from_config

HERE = Path(__file__).parent
UPDATES, LR, CLIP_NORM, GLOBAL_BATCH, PIECES = 30, 1e-3, 1.0, 16, 4
MARGIN = 1e-6
Collate = Callable[[Sequence[Sample]], Any]


def model() -> nn.Module:
    """The recipe's Llama, as it is drawn from one seed."""
    settings = tomllib.loads((HERE / "run.toml").read_text(encoding="utf-8"))["model"]["args"]["config"]
    torch.manual_seed(1)
    # without it, transformers' Trainer keeps keys and values, and then lets packed documents see each other
    return from_config({**settings, "use_cache": False}, dtype="float64")


def padded(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Each sample in a row of its own."""

    def column(name: str, padding: int) -> Tensor:
        tokens = [torch.tensor(dict(one)[name]) for one in samples]
        return nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=padding)

    ids = column("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": column("labels", -100)}


CUTS: dict[str, tuple[int, Collate]] = {
    "the whole batch in one row": (GLOBAL_BATCH, Packing()),
    "2 micro-batches in rows of 128 tokens": (GLOBAL_BATCH // 2, rows),
    "4 micro-batches of one row each": (GLOBAL_BATCH // 4, Packing()),
    "6 micro-batches of unequal size": (3, Packing()),
    "2 micro-batches, each sample with its padding": (GLOBAL_BATCH // 2, padded),
}


class Curve(Writer):
    """Keeps the loss of every update."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def write(self, records: Sequence[Record]) -> None:
        self.losses += [one.value for one in records if one.name == "train/loss"]


def here(micro_batch_size: int, collate: Collate, updates: int) -> list[float]:
    """The losses of the updates with evenstep."""
    trained, curve = model(), Curve()
    Trainer(
        model=trained,
        task=CausalLM(packed=collate is not padded),
        optimizer=torch.optim.AdamW(trained.parameters(), lr=LR, weight_decay=0.0),
        data=MapData(
            questions(split="train", count=GLOBAL_BATCH * updates),
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=micro_batch_size,
            collate=collate,
            shuffle=False,
        ),
        updates=updates,
        device="cpu",
        train=Training(clip_norm=CLIP_NORM),
        log=Logging(writers=[curve]),
    ).train()
    return curve.losses


def there(updates: int) -> list[float]:
    """The losses of the updates with transformers' Trainer."""
    import transformers

    losses: list[float] = []  # of each micro-batch, divided by the tokens of its update

    class Recorded(transformers.Trainer):
        def training_step(self, *args: Any, **more: Any) -> Tensor:
            loss = super().training_step(*args, **more)
            losses.append(float(loss))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=updates,
            per_device_train_batch_size=GLOBAL_BATCH // PIECES,
            gradient_accumulation_steps=PIECES,
            train_sampling_strategy="sequential",
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP_NORM,
            save_strategy="no",
            remove_unused_columns=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        samples: Any = questions(split="train", count=GLOBAL_BATCH * updates)
        trained: Any = model()
        Recorded(model=trained, args=arguments, train_dataset=samples, data_collator=Packing()).train()
    return [sum(losses[begin : begin + PIECES]) for begin in range(0, len(losses), PIECES)]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves of one length."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how far each cut is from transformers; 1 if one is too far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=UPDATES)
    given = parser.parse_args(arguments)
    wanted = there(given.updates)
    print(f"transformers: {wanted[0]:.6f} at first, {wanted[-1]:.6f} after {given.updates} updates")
    worst = 0.0
    for name, (size, collate) in CUTS.items():
        found = apart(here(size, collate, given.updates), wanted)
        worst = max(worst, found)
        print(f"{name}: {found:.1e} apart")
    print(f"the curves are at most {worst:.1e} apart; {MARGIN:.0e} is allowed")
    return int(not worst <= MARGIN)


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    sys.exit(main())
