"""Every optimizer of torch.optim, through the trainer: that of a plain loop, and resumed with the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import MapData, Trainer, Training
from kit import flat, trainer_of
from same import assert_same

NAMES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)
SPARSE = "SparseAdam"


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(7, 1, mode="sum", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x)


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if name == SPARSE:
        model: nn.Module = Bag()
        inputs = [torch.randint(7, (3,), generator=generator) for _ in range(24)]
    else:
        model = nn.Sequential(nn.Linear(4, 8, bias=name != "Muon"), nn.Tanh(), nn.Linear(8, 1, bias=name != "Muon"))
        inputs = [torch.randn(4, generator=generator) for _ in range(24)]
    data = [(one, torch.tensor(float(n % 5))) for n, one in enumerate(inputs)]
    return model, getattr(torch.optim, name)(model.parameters(), lr=0.01), data


def plain_loop(name: str, clip: float | None) -> Tensor:
    model, optimizer, data = made(name)
    for update in range(5):
        batch = data[8 * (update % 3) :][:8]
        x, y = (torch.stack([sample[part] for sample in batch]) for part in (0, 1))
        optimizer.zero_grad()
        (((model(x).squeeze(-1) - y) ** 2).sum() / 8).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return flat(model)


def trained(name: str, clip: float | None, *, updates: int = 5, state: Any = None) -> Trainer:
    model, optimizer, some = made(name)
    data = MapData(some, global_batch_size=8, micro_batch_size=3, shuffle=False)
    trainer = trainer_of(model, optimizer=optimizer, data=data, updates=updates, train=Training(clip_norm=clip))
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train()
    return trainer


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_trains_as_in_a_plain_loop(name: str, clip: float | None) -> None:
    ours, theirs = (1e9, None) if name == SPARSE and clip else (clip, clip)  # torch can't clip sparse gradients
    torch.testing.assert_close(flat(trained(name, ours).model), plain_loop(name, theirs), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_resumes_with_the_same_bits(name: str) -> None:
    state = trained(name, None, updates=2).state_dict()
    straight, resumed = trained(name, None).state_dict(), trained(name, None, state=state).state_dict()
    for part in ("model", "optimizer"):
        assert_same(straight[part], resumed[part], part)
