"""Every optimizer of torch.optim, through the trainer, against the same optimizer in a plain loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import MapData, Task, Trainer, Training
from evenstep.errors import ArgumentError
from refused import refused

NAMES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
)
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
SPARSE = "SparseAdam"


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(7, 1, mode="sum", sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x)


def made(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if name == SPARSE:
        data = [(torch.randint(7, (3,), generator=generator), torch.tensor(float(n % 5))) for n in range(24)]
        return Bag(sparse=True), data
    dense = nn.Sequential(nn.Linear(4, 8, bias=name != "Muon"), nn.Tanh(), nn.Linear(8, 1, bias=name != "Muon"))
    return dense, [(torch.randn(4, generator=generator), torch.tensor(float(n % 5))) for n in range(24)]


def optimizer_of(name: str, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), lr=0.01, **more)


def plain_loop(name: str, clip: float | None, **more: Any) -> list[Tensor]:
    model, data = made(name)
    optimizer = optimizer_of(name, model, **more)
    for update in range(5):
        batch = data[8 * (update % 3) :][:8]
        x, y = (torch.stack([sample[part] for sample in batch]) for part in (0, 1))
        optimizer.zero_grad()
        (((model(x).squeeze(-1) - y) ** 2).sum() / 8).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def trained(name: str, clip: float | None, **more: Any) -> list[Tensor]:
    settle = more.pop("settle", None)
    model, data = made(name)
    Trainer(
        model=model,
        task=Square(),
        optimizer=optimizer_of(name, model, **more),
        data=MapData(data, global_batch_size=8, micro_batch_size=3, shuffle=False),
        updates=5,
        device="cpu",
        train=Training(clip_norm=clip, settle_every_updates=settle),
    ).train()
    return [parameter.detach() for parameter in model.parameters()]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "LBFGS"])
def test_every_optimizer_trains_as_in_a_plain_loop(name: str, clip: float | None) -> None:
    if name == SPARSE and clip is not None:
        assert_same(trained(name, clip=1e9), plain_loop(name, clip=None))  # torch can't clip sparse gradients
    else:
        assert_same(trained(name, clip), plain_loop(name, clip))


@pytest.mark.parametrize("settle", [None, 3])
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_clip_inside_their_kernel_to_the_same_parameters(name: str, settle: int | None) -> None:
    assert_same(trained(name, 0.5, fused=True, settle=settle), plain_loop(name, 0.5))


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused_with_the_reason() -> None:
    model, data = made("LBFGS")
    with refused(ArgumentError, "optimizer"):
        Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.LBFGS(model.parameters()),
            data=MapData(data, global_batch_size=8),
            updates=1,
        )
