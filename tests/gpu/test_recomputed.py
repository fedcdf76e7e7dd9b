"""Activations that are computed again on a device: the same bits, less memory, and no wait of the host."""

from typing import Any

import torch
from torch import nn
from work import WIDTH, batches, engine_of, no_waiting, sha256

from evenstep import Memory, Training
from evenstep.train.engine import global_batch

DEPTH, ROWS = 8, 2048


def deep() -> nn.Sequential:
    """With dropout and running statistics in each block."""
    torch.manual_seed(3)

    def block() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 8 * WIDTH),
            nn.BatchNorm1d(8 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(8 * WIDTH, WIDTH),
        )

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))


def trained(device: torch.device, which: str) -> tuple[str, int]:
    """The sha256 of the state after some updates, and the most bytes that the device held in one; 0 on a CPU."""
    train: Any = Training(check_loss=False, settle_every_updates=100, memory=Memory(checkpoint=which))
    engine = engine_of(device, deep(), train=train)
    parts = batches(2, size=ROWS, device=device)
    engine.update(microbatches=parts)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    engine.update(microbatches=parts)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return sha256(engine.model.state_dict()), peak


def test_the_bits_are_those_of_a_run_that_keeps_all_and_the_memory_is_a_fraction(device: torch.device) -> None:
    kept, again = trained(device, "none"), trained(device, "blocks")
    assert kept[0] == again[0]
    if device.type == "cuda":
        assert again[1] < 0.5 * kept[1]


def test_nothing_that_is_computed_again_is_waited_for(device: torch.device) -> None:
    train: Any = Training(clip_norm=1.0, check_loss=False, settle_every_updates=100, memory=Memory(checkpoint="blocks"))
    engine = engine_of(device, deep(), train=train)
    parts = batches(2, device=device)

    def dispatch() -> None:
        batch = global_batch(parts, engine.progress.position, engine.reducers.group)
        engine.ledger.add(engine.parts.compute(batch, engine.progress))

    for _ in range(3):  # kernels are loaded, and the host decides the first step
        dispatch()
        assert engine.ledger.settle() is None
    with no_waiting(device):
        for _ in range(3):
            dispatch()
    assert engine.ledger.settle() is None
