"""A tuple of optimizers over one model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import MapData, Task, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.optim.optimizers import joined
from evenstep.optim.schedules import InverseSqrt
from evenstep.optim.stepper import Stepper
from refused import refused


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def both(model: nn.Module, **more: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return torch.optim.Adam(matrices, lr=0.02, **more), torch.optim.AdamW(others, lr=0.01, **more)


def points() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=draw), torch.randn(1, generator=draw)) for _ in range(16)]


def trained(clip_norm: float | None = None, **more: Any) -> Trainer:
    model = net()
    data = MapData(points(), global_batch_size=8, shuffle=False)
    trainer = Trainer(
        model=model,
        task=Square(),
        optimizer=both(model, **more),
        data=data,
        updates=4,
        device="cpu",
        train=Training(clip_norm=clip_norm),
        lr_schedule=InverseSqrt(warmup_updates=2),
    )
    trainer.train()
    return trainer


def by_hand(clip_norm: float | None, **more: Any) -> list[Tensor]:
    model, data = net(), points()
    optimizers = both(model, **more)
    for update in range(1, 5):
        start = 8 * ((update - 1) % 2)
        x, y = (torch.stack([sample[part] for sample in data[start : start + 8]]) for part in (0, 1))
        (((model(x) - y) ** 2).sum() / 8).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for one, lr in zip(optimizers, (0.02, 0.01), strict=True):
            one.param_groups[0]["lr"] = lr * InverseSqrt(warmup_updates=2)(update, 4)
            one.step()
            one.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_two_optimizers_over_one_model_step_as_two_optimizers_by_hand(clip_norm: float | None, fused: bool) -> None:
    trainer = trained(clip_norm, fused=fused)
    for mine, theirs in zip(trainer.model.parameters(), by_hand(clip_norm, fused=fused), strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-5, atol=1e-6)


def test_kernels_scale_and_skip_the_step_if_all_of_them_can() -> None:
    model = net()
    fused, plain = both(model, fused=True), both(model)
    assert not Stepper(joined((fused[0], plain[1]))).takes_scale
    stepper = Stepper(joined(fused))
    assert stepper.takes_scale
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper.step(1, scale=torch.full((), 2.0), found_inf=torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(hasattr(one, "found_inf") for one in fused)


class OwnStateDict(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


@pytest.mark.parametrize(
    "given",
    [
        lambda model: (torch.optim.SGD(model.parameters()), torch.optim.Adam(model[0].parameters())),
        lambda model: (OwnStateDict(model.parameters()),),
    ],
)
def test_shared_parameters_and_own_state_dicts_are_refused(given: Any) -> None:
    with refused(ArgumentError, "optimizer"):
        joined(given(net()))
