"""Updates compiled as a whole on a CUDA device, where each is one captured graph."""

import pytest
import torch
from torch import Tensor, nn

from evenstep import Aborted, Committed, Ema, Engine, Task, Training


class Squares(Task):
    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def batch(update: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(update)
    return torch.randn(size, 8, generator=generator), torch.randn(size, generator=generator)


def engine_on(device: torch.device, compile: str) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train = Training(compile=compile, clip_norm=1.0, ema=Ema(decay=0.9))  # type: ignore[arg-type]
    return Engine(model, Squares(), optimizer, device=device, train=train)


def trained(device: torch.device, compile: str) -> tuple[Tensor, list[float]]:
    engine, losses = engine_on(device, compile), list[float]()
    for update in range(50):
        outcome = engine.update(batch(update), batch(-update - 1, 16 if update % 5 else 9))
        assert isinstance(outcome, Committed)
        losses.append(outcome.loss)
    return torch.cat([one.detach().flatten().cpu() for one in engine.model.parameters()]), losses


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
