import math
from typing import Any

import pytest
import torch

from evenstep.events import Bus, Statistics, StepEvent, UpdateEvent


def attached(trainer: Any, **arguments: Any) -> Statistics:
    hook = Statistics(**arguments)
    Bus([hook], trainer)
    return hook


def run(hook: Statistics, trainer: Any, update: int, *, committed: bool = True) -> dict[str, float]:
    hook.before_update(UpdateEvent(update=update, num_microbatches=1))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.5)
    hook.after_update(UpdateEvent(update=update, committed=committed, num_samples=1))
    return {record.name: record.value for record in trainer.storage.settle()}


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(one.double().pow(2).sum().item() for one in tensors))


def test_norms_and_ratios_are_those_of_each_group(trainer: Any) -> None:
    weight, bias = trainer.model.weight, trainer.model.bias
    groups = [{"params": [weight], "lr": 0.5}, {"params": [bias], "lr": torch.tensor(0.25)}]
    trainer.optimizer = torch.optim.SGD(groups)
    values = run(attached(trainer, every_updates=1, update_ratio=True), trainer, 1)
    assert values["train/lr/0"] == 0.5
    assert values["train/lr/1"] == 0.25
    for index, parameter in enumerate([weight, bias]):
        assert values[f"train/param_norm/{index}"] == pytest.approx(norm([parameter]), rel=1e-6)
        expected = 0.5 * math.sqrt(parameter.numel()) / norm([parameter])
        assert values[f"train/update_ratio/{index}"] == pytest.approx(expected, rel=1e-5)


def test_nothing_is_put_between_the_periods_or_for_an_update_given_up(trainer: Any) -> None:
    hook = attached(trainer, every_updates=2, update_ratio=True)
    assert run(hook, trainer, 1) == {}
    assert run(hook, trainer, 2, committed=False) == {}
    assert set(run(hook, trainer, 2)) == {"train/lr/0", "train/param_norm/0", "train/update_ratio/0"}


def test_without_the_ratio_no_parameter_is_copied(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = attached(trainer, every_updates=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", None, raising=False)
        assert set(run(hook, trainer, 1)) == {"train/lr/0", "train/param_norm/0"}


def test_norms_of_gradients_are_those_of_each_layer_without_the_loss_scale(trainer: Any) -> None:
    trainer.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    trainer.model.scale = torch.nn.Parameter(torch.ones(()))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    hook = attached(trainer, every_updates=2, gradient_norms=True)
    for number, parameter in enumerate(trainer.model.parameters()):
        parameter.grad = torch.full_like(parameter, 8.0 * (number + 1))
    trainer.model[2].bias.grad = None
    hook.before_step(StepEvent(update=1, divisor=8.0))
    assert trainer.storage.settle() == []
    hook.before_step(StepEvent(update=2, divisor=torch.tensor(8.0)))
    values = {record.name: record.value for record in trainer.storage.settle()}
    assert values == pytest.approx(
        {
            "train/grad_norm/scale": 1.0,
            "train/grad_norm/0": math.sqrt(6 * 2**2 + 2 * 3**2),
            "train/grad_norm/2": math.sqrt(2 * 4**2),
        }
    )


def test_nothing_waits_for_the_device(trainer: Any) -> None:
    trainer.model.to("meta")  # tensors without data: reading one raises
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    hook = attached(trainer, every_updates=1, update_ratio=True, gradient_norms=True)
    hook.before_update(UpdateEvent(update=1, num_microbatches=1))
    trainer.model.weight.grad = trainer.model.weight.detach()
    hook.before_step(StepEvent(update=1, divisor=torch.ones((), device="meta")))
    hook.after_update(UpdateEvent(update=1, committed=True, num_samples=1))
