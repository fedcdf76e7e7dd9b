"""Memory on a device: one that runs out and is cut, pinned batches, and saves while training goes on."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from work import (
    SIDE,
    WIDTH,
    Mean,
    Small,
    Waves,
    ended_at,
    engine_of,
    flat,
    network,
    no_waiting,
    precision_of,
    samples,
    sha256,
    trainer_of,
    wide_batch,
)

from evenstep import Engine, MapData, Task, Training, chunked_cross_entropy
from evenstep.checkpoint.background import Staging
from evenstep.data import ReadOptions
from evenstep.oom import give_back
from evenstep.options import Checkpointing
from evenstep.precision import PRECISIONS

ROOM = 448 << 20  # bytes that the balloon leaves


@contextmanager
def balloon(device: torch.device) -> Generator[None]:
    """Inside, only `ROOM` bytes of the device's memory are free."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    give_back()
    free, _ = torch.cuda.mem_get_info(device)
    held: Any = torch.empty(free - ROOM, dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del held
        give_back()


def test_a_micro_batch_that_does_not_fit_is_cut_and_the_update_is_the_same(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    def engine(kind: type[nn.Module]) -> Engine:
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        return Engine(model, Mean(), optimizer, device=device, train=Training(check_loss=False))

    cut = engine(Waves if device.type == "cuda" else Small)
    with balloon(device):
        for _ in range(2):
            cut.update(wide_batch())
    assert cut.parts.context.cuts.limit is not None
    assert any("memory" in record.getMessage() for record in caplog.records)
    if device.type == "cuda":
        whole = engine(Waves)
        for _ in range(2):
            whole.update(wide_batch())
        assert whole.parts.context.cuts.limit is None
        torch.testing.assert_close(flat(cut.model), flat(whole.model), rtol=1e-5, atol=1e-7)


def test_the_first_cut_is_found_by_trying(device: torch.device) -> None:
    model = Waves() if device.type == "cuda" else Small()
    generator = torch.Generator().manual_seed(2)
    data = [(torch.randn(SIDE, generator=generator), torch.tensor(0.5)) for _ in range(SIDE)]
    with balloon(device):
        trainer = trainer_of(
            device,
            model,
            task=Mean(),
            data=MapData(data, global_batch_size=SIDE),
            updates=2,
            train=Training(check_loss=False),
        )
        trainer.train()
    assert trainer.progress.update == 2


class Devices(Task):
    """Notes where batches are when they come to the task."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def transform(self, batch: Any) -> Any:
        self.seen.add(batch[0].device.type)
        return batch

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output.squeeze(-1) - batch[1]).square().sum()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_pinned_and_moved_also_those_of_workers(device: torch.device, num_workers: int) -> None:
    """Workers are forked after CUDA was used in this process."""
    torch.ones(1, device=device).sum().item()
    data = MapData(samples(), global_batch_size=8, micro_batch_size=4, num_workers=num_workers)
    pins = device.type == "cuda"
    task = Devices()
    trainer = trainer_of(device, task=task, data=data)
    trainer.train()
    assert task.seen == {device.type}
    try:
        one = next(iter(data.batches(ReadOptions(seed=1, pin_memory=pins))))
    finally:
        data.close()
    first: Any = one.microbatches[0].data
    assert first[0].is_pinned() == pins


def test_what_a_save_has_copied_is_what_was_there_when_it_began(device: torch.device) -> None:
    """Training writes to the tensors while the copies are on their way to the host."""
    tensors = {str(number): torch.full((1 << 18,), float(number), device=device) for number in range(8)}
    staging = Staging()
    staging.reserve(tensors.values())
    for number in range(3):
        expected = {name: value.cpu().clone() for name, value in tensors.items()}
        copies, wait = staging.copy(tensors)
        for value in tensors.values():
            for _ in range(20):
                value.add_(1.0)
        wait()
        assert all(torch.equal(copies[name], value) for name, value in expected.items()), number


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_is_gone_on_with_to_the_bit(
    device: torch.device, tmp_path: Path, asynchronous: bool, precision: str
) -> None:
    if device.type == "cpu" and not (asynchronous and precision == "32-true"):
        pytest.skip("on the CPU other tests show it")

    def run(folder: str, updates: int, *, goes_on: bool = False) -> str:
        return ended_at(
            device,
            tmp_path / folder,
            goes_on=goes_on,
            model=network(norm=True),
            updates=updates,
            precision=precision_of(precision, device),
            checkpoint=Checkpointing(every_updates=2, keep_last=None, asynchronous=asynchronous),
        )

    whole = run("whole", 9)
    run("parts", 4)
    assert run("parts", 9, goes_on=True) == whole


def test_a_state_of_the_device_is_loaded_on_the_host(device: torch.device) -> None:
    """Without dropout, of which each kind of device draws its own numbers, and without a bias before BatchNorm, whose
    gradient is pure rounding.
    """
    engine = engine_of(device, network(dropout=0.0))
    one = [(torch.randn(4, WIDTH), torch.randn(4))]
    engine.update(microbatches=one)
    other = engine_of(torch.device("cpu"), network(dropout=0.0))
    other.load_state_dict(engine.state_dict())
    assert sha256(other.model.state_dict()) == sha256(engine.model.state_dict())
    other.update(microbatches=one)
    engine.update(microbatches=one)
    torch.testing.assert_close(flat(other.model), flat(engine.model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_scores_in_chunks_are_those_at_once_and_take_a_fraction_of_their_memory(
    device: torch.device, autocast: bool
) -> None:
    is_cuda = device.type == "cuda"
    tokens, width, vocab = (8192, 256, 32768) if is_cuda else (32, 8, 64)
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(tokens, width, generator=generator) * 0.1).to(device).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(device).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator).to(device)

    def plain() -> Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(hidden, weight), targets, reduction="sum")

    def made(loss: Any) -> tuple[list[Tensor], int]:
        give_back()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if is_cuda else 0
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            value = loss()
        gradients = torch.autograd.grad(value, (hidden, weight))
        peak = torch.cuda.max_memory_allocated() - before if is_cuda else 0
        return [value.detach().float(), *(one.float() for one in gradients)], peak

    whole, at_once = made(plain)
    chunks, in_chunks = made(lambda: chunked_cross_entropy(hidden, weight, targets))
    for one, other in zip(chunks, whole, strict=True):
        assert float((one - other).norm()) <= (2e-2 if autocast else 1e-4) * float(other.norm())
    assert in_chunks <= 0.3 * at_once
    with no_waiting(device):
        made_again = chunked_cross_entropy(hidden, weight, targets)
    assert made_again.device.type == device.type
