"""A tuple of optimizers over one model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kit
from evenstep import Training
from evenstep.errors import ArgumentError
from evenstep.optim.optimizers import joined
from evenstep.optim.schedules import InverseSqrt
from evenstep.optim.stepper import Stepper
from refused import refused


def both(model: nn.Module, **more: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return torch.optim.Adam(matrices, lr=0.02, **more), torch.optim.AdamW(others, lr=0.01, **more)


def by_hand(clip_norm: float | None, **more: Any) -> Tensor:
    model = kit.net()
    optimizers = both(model, **more)
    for update in range(1, 5):
        start = 8 * ((update - 1) % 2)
        x, y = kit.stacked(kit.points(16)[start : start + 8])
        (((model(x).squeeze(-1) - y) ** 2).sum() / 8).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for one, lr in zip(optimizers, (0.02, 0.01), strict=True):
            one.param_groups[0]["lr"] = lr * InverseSqrt(warmup_updates=2)(update, 4)
            one.step()
            one.zero_grad()
    return kit.flat(model)


@pytest.mark.parametrize(("clip_norm", "fused"), [(None, False), (0.5, True), (0.5, False)])
def test_two_optimizers_over_one_model_step_as_two_optimizers_by_hand(clip_norm: float | None, fused: bool) -> None:
    model = kit.net()
    kit.trainer_of(
        model,
        optimizer=both(model, fused=fused),
        data=kit.data(16, micro=None, shuffle=False),
        updates=4,
        train=Training(clip_norm=clip_norm),
        lr_schedule=InverseSqrt(warmup_updates=2),
    ).train()
    torch.testing.assert_close(kit.flat(model), by_hand(clip_norm, fused=fused), rtol=1e-6, atol=1e-8)


def test_kernels_scale_and_skip_the_step_if_all_of_them_can() -> None:
    model = kit.net()
    fused, plain = both(model, fused=True), both(model)
    assert not Stepper(joined((fused[0], plain[1]))).takes_scale
    stepper = Stepper(joined(fused))
    assert stepper.takes_scale
    before = kit.flat(model).clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper.step(1, scale=torch.full((), 2.0), found_inf=torch.ones(()))
    assert torch.equal(kit.flat(model), before)
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
        joined(given(kit.net()))
