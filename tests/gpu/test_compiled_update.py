"""Updates compiled as a whole on a CUDA device, where each is one captured graph."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launched import on_ranks
from ranks_programs import trained as trained_on_ranks
from torch import Tensor
from work import WIDTH, ended_at, engine_of, flat, network, no_waiting, precision_of, samples

from evenstep import Ema, Engine, Failures, Training
from evenstep.options import Checkpointing
from evenstep.train import Aborted, Committed
from evenstep.train.engine import global_batch


def batch(update: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(update)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, generator=generator)


def engine_on(device: torch.device, compile: Any) -> Engine:
    train = Training(compile=compile, clip_norm=1.0, ema=Ema(decay=0.9))
    return engine_of(device, network(dropout=0.0), train=train)


def trained(device: torch.device, compile: str) -> tuple[Tensor, list[float]]:
    engine, losses = engine_on(device, compile), list[float]()
    for update in range(50):
        outcome = engine.update(microbatches=[batch(update), batch(-update - 1, 16 if update % 5 else 9)])
        assert isinstance(outcome, Committed)
        losses.append(outcome.loss)
    return flat(engine.model), losses


@pytest.mark.gpu
def test_a_captured_update_is_the_one_that_is_not_and_is_the_same_again(cuda: torch.device) -> None:
    (eager, losses), (one, told), (other, again) = (trained(cuda, how) for how in ("off", "update", "update"))
    assert float((one - eager).norm() / eager.norm()) < 1e-5
    assert told == pytest.approx(losses, rel=1e-4)
    assert torch.equal(one, other) and told == again


@pytest.mark.gpu
def test_a_captured_update_that_is_not_finite_changes_nothing(cuda: torch.device) -> None:
    engine = engine_on(cuda, "update")
    for update in range(3):
        assert isinstance(engine.update(batch(update)), Committed)
    before = [one.detach().clone() for one in engine.model.parameters()]
    x, y = batch(3)
    assert isinstance(engine.update((x, y * float("inf"))), Aborted)
    assert all(torch.equal(one, kept) for one, kept in zip(engine.model.parameters(), before, strict=True))
    assert isinstance(engine.update(batch(3)), Committed)


@pytest.mark.gpu
def test_captured_updates_are_not_waited_for(cuda: torch.device) -> None:
    """Two forms of micro-batches in turns, a rate that moves, an average and a metric."""
    train = Training(compile="update", clip_norm=1.0, ema=Ema(decay=0.9), check_loss=False, settle_every_updates=100)
    engine = engine_of(cuda, network(), train=train)
    forms = [[tuple(one.pin_memory() for one in batch(number, size)) for number in range(2)] for size in (16, 9)]

    def dispatch(number: int) -> None:
        batch = global_batch(forms[number % 2], engine.progress.position, engine.reducers.group)
        engine.ledger.add(engine.parts.compute(batch, engine.progress))

    for number in range(8):  # compiled, captured, and the host decides the first step
        dispatch(number)
        assert engine.ledger.settle() is None
    with no_waiting(cuda):
        for number in range(6):
            dispatch(number)
    assert engine.ledger.settle() is None
    assert engine.progress.update == 14


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_captured_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    cuda: torch.device, precision: str, tmp_path: Path
) -> None:
    """With a batch that is not finite, which is skipped, and dropout."""

    def run(folder: str, updates: int, *, goes_on: bool = False) -> str:
        return ended_at(
            cuda,
            tmp_path / folder,
            goes_on=goes_on,
            model=network(),
            samples=samples(bad=[17]),
            updates=updates,
            precision=precision_of(precision, cuda),
            train=Training(compile="update", clip_norm=1.0, ema=Ema(decay=0.9), check_loss=False),
            failures=Failures(non_finite="skip"),
            checkpoint=Checkpointing(every_updates=4, keep_last=None),
        )

    whole = run("whole", 12)
    run("parts", 8)
    assert run("parts", 12, goes_on=True) == whole


@pytest.mark.gpu
def test_captured_updates_of_two_ranks_on_one_device_are_those_that_are_not(cuda: torch.device) -> None:
    """Without dropout, of which a graph draws other numbers."""
    one, two = (
        on_ranks(2, trained_on_ranks, "cuda", "ddp", 1, "32-true", 0.0, compile, timeout_s=80)[0]
        for compile in ("off", "update")
    )
    assert not isinstance(one, str) and not isinstance(two, str), (one, two)
    torch.testing.assert_close(torch.tensor(two[1]), torch.tensor(one[1]), rtol=1e-4, atol=1e-5)
