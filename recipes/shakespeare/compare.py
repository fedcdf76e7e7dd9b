"""The recipe beside a plain loop with nanoGPT's settings, each in a process of its own, in turns: `python compare.py`.

The plain loop does what nanoGPT's `train.py` does on a CPU: windows drawn anew for each iteration, `AdamW` as torch
gives it, `clip_grad_norm_`, the cosine written out, the loss read in every iteration. Both train the same model on the
same text from the same seed, and evaluate all of the last tenth as often. It prints loss and processor time for each
seed, and exits 1 if the recipe takes more processor time, or ends at a mean loss that is worse by more than two
standard deviations of the plain loop's over seeds.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from math import cos, pi
from pathlib import Path
from statistics import mean, stdev
from time import process_time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Characters, characters
from model import CharGPT, char_gpt
from task import NextCharacter

from evenstep import Evaluation, MapData, Trainer, Training, grouped_optimizer
from evenstep.optim.schedules import Cosine

CONTEXT, BATCH, WARMUP, RATE, LOWEST = 64, 12, 100, 1e-3, 0.1
EVALUATE_EVERY = 500
BETAS, DECAY = (0.9, 0.99), 0.1
CONTENDERS = ("evenstep", "plain loop")


def model_of(seed: int) -> CharGPT:
    """The recipe's model with the parameters of a seed."""
    torch.manual_seed(seed)
    return char_gpt(layers=4, width=128, heads=4, context=CONTEXT)


def splits() -> tuple[Characters, Characters]:
    """What is drawn from, and what is evaluated."""
    train = characters("train", context=CONTEXT, stride=1)
    return train, characters("valid", context=CONTEXT, stride=CONTEXT)


def evenstep_loss(seed: int, updates: int) -> float:
    """The loss per character on the last tenth, after training with evenstep."""
    model, (train, valid) = model_of(seed), splits()
    trainer = Trainer(
        model=model,
        task=NextCharacter(),
        optimizer=grouped_optimizer(
            model,
            torch.optim.AdamW,
            lr=RATE,
            options={"weight_decay": DECAY, "betas": BETAS, "fused": True},
            weight_decay_on="matrices",
        ),
        data=MapData(train, global_batch_size=BATCH),
        updates=updates,
        seed=seed,
        device="cpu",
        lr_schedule=Cosine(warmup_updates=min(WARMUP, updates), end_factor=LOWEST),
        train=Training(clip_norm=1.0),
        evaluations={"valid": MapData(valid, global_batch_size=60, shuffle=False)},
        evaluation=Evaluation(every_updates=EVALUATE_EVERY),
    )
    return float(trainer.train().metrics["valid/loss"])


def plain_loss(seed: int, updates: int) -> float:
    """The same after training with a loop of plain PyTorch."""
    model, (train, valid) = model_of(seed), splits()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
    codes = train.codes.long()
    loss = float("nan")
    for number in range(updates):
        share = min(1.0, (number + 1) / WARMUP)
        if number >= WARMUP:
            share = LOWEST + (1 - LOWEST) * (1 + cos(pi * (number - WARMUP) / (updates - WARMUP))) / 2
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        starts = torch.randint(len(codes) - CONTEXT, (BATCH,)).tolist()
        inputs = torch.stack([codes[start : start + CONTEXT] for start in starts])
        targets = torch.stack([codes[start + 1 : start + 1 + CONTEXT] for start in starts])
        nats = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        nats.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nats.item()
        if (number + 1) % EVALUATE_EVERY == 0 or number + 1 == updates:
            loss = evaluated(model, valid)
    return loss


@torch.no_grad()
def evaluated(model: CharGPT, valid: Characters) -> float:
    """The mean loss per character of all windows."""
    model.eval()
    total = 0.0
    for begin in range(0, len(valid), 60):
        several = [valid[number] for number in range(begin, min(begin + 60, len(valid)))]
        inputs, targets = (torch.stack(column) for column in zip(*several, strict=True))
        total += float(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"))
    model.train()
    return total / (len(valid) * CONTEXT)


def measured(contender: str, seed: int, updates: int) -> tuple[float, float]:
    """Loss and processor seconds of one contender, in a process of its own."""
    command = [sys.executable, __file__, "--one", contender, "--seeds", str(seed), "--updates", str(updates)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["loss"], found["cpu_s"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare over seeds; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--one", choices=CONTENDERS, help="one contender, in this process: prints its figures as JSON")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.one:
        begin = process_time()
        loss = (evenstep_loss if given.one == "evenstep" else plain_loss)(given.seeds[0], given.updates)
        print(json.dumps({"loss": loss, "cpu_s": process_time() - begin}))
        return 0
    losses: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    ratios: list[float] = []
    for number, seed in enumerate(given.seeds):
        seconds: dict[str, float] = {}
        for contender in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
            loss, seconds[contender] = measured(contender, seed, given.updates)
            losses[contender].append(loss)
            print(
                f"seed {seed}, {contender:10}: loss {loss:.4f}, {seconds[contender]:.0f} s of processor time",
                flush=True,
            )
        ratios.append(seconds["evenstep"] / seconds["plain loop"])
    worse = mean(losses["evenstep"]) - mean(losses["plain loop"])
    allowed = 2 * stdev(losses["plain loop"]) if len(given.seeds) > 1 else 0.02
    print(f"mean loss {mean(losses['evenstep']):.4f}, plain loop {mean(losses['plain loop']):.4f}: {worse:+.4f}")
    print(f"processor time {mean(ratios):.3f} × the plain loop's ({min(ratios):.3f} to {max(ratios):.3f})")
    return 0 if worse <= allowed and mean(ratios) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
