"""Optimizers that can't be stepped, shared or resumed exactly are refused when the trainer is built; others train."""

from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import Checkpointing, Hook, Statistics, Trainer
from evenstep.errors import ArgumentError
from evenstep.internals import unwrapped_step
from evenstep.parallel import Fsdp, Group, Single, Strategy, Zero1
from evenstep.precision import FullPrecision
from evenstep.train.checks import check_optimizer
from kit import data, flat, net
from kit import trainer_of as trainer_of_kit


def trainer_of(make: Any, *hooks: Hook, **more: Any) -> Trainer:
    model = more.pop("model", None) or net(dtype=torch.float32)
    some = data(16, micro=4, dtype=torch.float32)
    options: dict[str, Any] = {"updates": 4, "data": some, "evaluations": {"valid": some}}
    options["checkpoint"] = Checkpointing(asynchronous=False)
    return trainer_of_kit(model, *hooks, optimizer=make(model.parameters()), **(options | more))


class Unknown(torch.optim.SGD):
    pass


class Elementwise(Unknown):
    elementwise = True


class Parameterwise(Unknown):
    parameterwise = True


class KeepsItsOwn(Elementwise):
    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, **more)
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}


class Closing(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def shards() -> Strategy:
    return Fsdp(Group(), reduction="fast")


def parts() -> Strategy:
    return Zero1(Group())


@pytest.mark.parametrize(
    ("kind", "strategy", "is_refused"),
    [
        (Unknown, parts, True),
        (Unknown, shards, True),
        (Parameterwise, parts, False),
        (Parameterwise, shards, True),
        (Elementwise, parts, False),
        (KeepsItsOwn, parts, True),
        (KeepsItsOwn, shards, True),
        (torch.optim.LBFGS, Single, True),
        (Closing, Single, True),
    ],
)
def test_an_optimizer_that_a_strategy_can_not_share_or_step_is_refused(
    kind: Any, strategy: Any, is_refused: bool
) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    if is_refused:
        with pytest.raises(ArgumentError):
            check_optimizer(optimizer, model=model, strategy=strategy(), precision=FullPrecision())
    else:
        check_optimizer(optimizer, model=model, strategy=strategy(), precision=FullPrecision())


class OwnRate(torch.optim.Optimizer):
    """Finds its rate by itself, as Adafactor of transformers does with `lr=None`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=0.1 / state["step"])


def test_an_optimizer_that_finds_its_rate_trains_and_resumes(tmp_path: Path) -> None:
    straight = trainer_of(OwnRate, Statistics(every_updates=1))
    assert not [name for name in straight.train().metrics if name.startswith("train/lr")]
    trainer_of(OwnRate, folder=tmp_path / "run", updates=2).train()
    resumed = trainer_of(OwnRate, folder=tmp_path / "run")
    resumed.resume()
    resumed.train()
    assert torch.equal(flat(straight.model), flat(resumed.model))


class Averaging(torch.optim.Optimizer):
    """Trains y and evaluates a mean of what it was, as schedule-free optimizers do."""

    parameterwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "training": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"], "the optimizer was not in train mode"
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("mean", parameter.detach().clone())
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["mean"].lerp_(parameter, 0.3)

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)

    def _exchange(self, training: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["training"] != training and parameter in self.state:
                    was = parameter.clone()
                    parameter.copy_(self.state[parameter]["mean"])
                    self.state[parameter]["mean"].copy_(was)
            group["training"] = training


def test_an_optimizer_with_modes_trains_and_evaluates_in_the_right_mode() -> None:
    one = trainer_of(Averaging)
    one.train()
    kept = flat(one.model)
    loss = one.evaluate()["valid"]["loss"]
    assert one.optimizer.param_groups[0]["training"]
    assert torch.equal(kept, flat(one.model))
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.copy_(one.optimizer.state[parameter]["mean"])
    vars(one.optimizer)["eval"] = vars(one.optimizer)["train"] = lambda: None
    assert one.evaluate()["valid"]["loss"] == loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def test_a_run_that_saves_takes_the_short_way_to_the_step_and_calls_hooks_on_it(tmp_path: Path) -> None:
    saving, called = trainer_of(sgd, folder=tmp_path / "a"), list[int]()
    for _ in range(2):
        assert unwrapped_step(saving.optimizer) is not None
        saving.train()
    hooked = trainer_of(sgd, folder=tmp_path / "b")
    hooked.optimizer.register_step_post_hook(lambda *_: called.append(1))
    hooked.train()
    assert len(called) == 4


def test_another_kernel_than_the_one_that_saved_gets_its_count_as_it_needs_it() -> None:
    def trained(state: Any, **kernel: bool) -> Trainer:
        trainer = trainer_of(lambda parameters: torch.optim.AdamW(parameters, **kernel), updates=4 if state else 2)
        if state:
            trainer.load_state_dict(state)
        trainer.train()
        return trainer

    fused = trained(trained(None, foreach=False).state_dict(), fused=True)
    assert all(int(one["step"]) == 4 for one in fused.optimizer.state.values())
