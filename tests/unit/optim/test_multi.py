"""Several optimizers as one."""

import copy
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from evenstep import MapData, Mixture, Task, Trainer, Training, Uncertainty
from evenstep.errors import ArgumentError
from evenstep.internals import takes_scale
from evenstep.optim import MultiOptimizer
from evenstep.optim.schedules import InverseSqrt
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


def test_scaling_is_done_in_the_kernels_where_all_of_them_can() -> None:
    model = net()
    assert takes_scale(MultiOptimizer(*both(model, fused=True)))
    assert not takes_scale(MultiOptimizer(both(model, fused=True)[0], both(model)[1]))
    optimizer = MultiOptimizer(*both(model, fused=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.grad_scale, optimizer.found_inf = torch.full((), 2.0), torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(hasattr(one, "found_inf") for one in optimizer.optimizers)


def test_one_among_several_stands_for_those_that_it_is_made_of() -> None:
    model = net()
    first, second = both(model)
    assert MultiOptimizer(MultiOptimizer(first), second).optimizers == (first, second)


def test_schedulers_see_the_groups_of_all_and_copies_are_whole() -> None:
    model = net()
    optimizer = MultiOptimizer(*both(model))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(MultiOptimizer(*both(net()))))):
        assert len(again.param_groups) == 2
    assert len(copy.deepcopy(optimizer).state) == len(optimizer.state) == 4


def test_its_state_dict_is_torchs_and_comes_back() -> None:
    trainer = trained()
    kept = copy.deepcopy(trainer.optimizer.state_dict())
    assert list(kept["state"]) == [0, 1, 2, 3]
    other = MultiOptimizer(*both(net()))
    other.load_state_dict(kept)
    for key, values in other.state_dict()["state"].items():
        assert all(torch.equal(value, kept["state"][key][name]) for name, value in values.items())
    with pytest.raises(ValueError, match="has 1 parameter groups, but there are 2"):
        other.load_state_dict({"state": {}, "param_groups": kept["param_groups"][:1]})


class Counts(torch.optim.SGD):
    """Keeps in its state what belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        self.param_groups[0]["lr"] = 0.1 / self.state["all"]["steps"]
        return super().step(closure)


def test_what_belongs_to_no_parameter_is_each_optimizers_own_and_is_resumed(tmp_path: Path) -> None:
    def trainer_of(updates: int, folder: Path | None = None) -> Trainer:
        model = net()
        parts = [[one for one in model.parameters() if (one.ndim == 2) == first] for first in (True, False)]
        optimizer = MultiOptimizer(*(Counts(part, momentum=0.5) for part in parts))
        optimizer.state["1.all"] = {"steps": 3}  # the second is ahead
        data = MapData(points(), global_batch_size=8)
        return Trainer(
            model=model, task=Square(), optimizer=optimizer, data=data, updates=updates, folder=folder, device="cpu"
        )

    through = trainer_of(4)
    through.train()
    assert [one.state["all"]["steps"] for one in cast("Any", through.optimizer).optimizers] == [4, 7]
    trainer_of(2, tmp_path).train()
    resumed = trainer_of(4, tmp_path)
    resumed.resume()
    resumed.train()
    assert resumed.optimizer.state["1.all"] == {"steps": 7} and "2.all" not in resumed.optimizer.state
    assert all(map(torch.equal, resumed.model.parameters(), through.model.parameters()))


class Telling(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


@pytest.mark.parametrize(
    "given",
    [
        lambda model: [torch.optim.SGD(model.parameters()), torch.optim.Adam(model[0].parameters())],
        lambda model: [torch.optim.SGD(model.parameters()), torch.optim.SGD(model[0].parameters())],
        lambda model: [Telling(model.parameters())],
    ],
)
def test_what_can_not_be_one_is_refused(given: Any) -> None:
    with refused(ArgumentError, "optimizer"):
        MultiOptimizer(*given(net()))


def test_a_group_that_is_added_is_the_last_optimizers() -> None:
    model, more = net(), nn.Parameter(torch.zeros(2))
    optimizer = MultiOptimizer(*both(model))
    optimizer.add_param_group({"params": [more]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 1]
    assert optimizer.param_groups[2]["lr"] == optimizer.defaults["lr"] == 0.01


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_coefficients_that_are_learned_are_the_last_optimizers_without_weight_decay() -> None:
    model, data = Wrapped(), MapData(points(), global_batch_size=8)
    optimizer = MultiOptimizer(*both(model))
    Trainer(
        model=model,
        task={"one": Square(), "two": Square()},
        optimizer=optimizer,
        data=Mixture({"one": data, "two": MapData(points(), global_batch_size=8)}),
        updates=2,
        device="cpu",
        train=Training(coefficients=Uncertainty()),
    ).train()
    learned = optimizer.param_groups[2]
    assert learned["weight_decay"] == 0 and all(len(optimizer.state[one]) for one in learned["params"])
