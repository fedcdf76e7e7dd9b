"""Steps that hooks and loops take beside those of updates are refused by name; the others are left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from evenstep import Engine, Hook, Logging, MapData, Task, Trainer
from evenstep.errors import ArgumentError, HookError
from evenstep.optim import MultiOptimizer


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def adam(model: nn.Linear) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, fused=True)


def several(model: nn.Linear) -> Optimizer:
    return MultiOptimizer(SGD([model.weight], lr=0.01), AdamW([model.bias], lr=0.01))


def trained(method: str, act: Callable[[Any], Any], made: Callable[[nn.Linear], Optimizer] = adam) -> Trainer:
    """A run of which a hook's `method` does something to the optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    hook = type("Mine", (Hook,), {method: lambda self, event: act(self.trainer.optimizer)})()
    trainer = Trainer(
        model=model,
        task=Square(),
        optimizer=made(model),
        data=MapData([(torch.ones(4) * n, torch.tensor(n % 3)) for n in range(8)], global_batch_size=8),
        updates=2,
        hooks=[hook],
        device="cpu",
        log=Logging(writers=()),
    )
    trainer.train()
    return trainer


def inner_step(optimizer: Any) -> None:
    optimizer.optimizers[0].step()


def drop_all(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = None


def drop_bias(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


@pytest.mark.parametrize("method", ["before_train", "after_backward", "before_step", "after_update"])
def test_a_step_in_a_hook_is_refused(method: str) -> None:
    with pytest.raises(HookError, match=f"`{method}` of hook `Mine` has called `step` of the optimizer"):
        trained(method, lambda optimizer: optimizer.step())
    with pytest.raises(HookError, match="has called `step`"):
        trained(method, inner_step, several)


@pytest.mark.parametrize("method", ["after_microbatch", "before_step"])
def test_dropping_gradients_in_the_midst_of_an_update_is_refused(method: str) -> None:
    with pytest.raises(HookError, match=f"`{method}` of hook `Mine` has called `zero_grad`"):
        trained(method, drop_all)
    trained(method, drop_bias)  # which then has none, as somebody may mean
    for made in (adam, several):
        with pytest.raises(HookError, match=f"`{method}` of hook `Mine` has called `zero_grad`"):
            trained(method, lambda optimizer: optimizer.zero_grad(), made)


def test_hooks_that_leave_gradients_alone_or_drop_them_later_change_no_bit() -> None:
    plain = trained("on_incident", print)
    for method in ("before_update", "after_step", "after_update"):
        same = trained(method, lambda optimizer: optimizer.zero_grad())
        assert torch.equal(same.model.get_parameter("weight"), plain.model.get_parameter("weight"))
        assert "zero_grad" not in vars(same.optimizer)
    scheduled = trained("before_train", lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert torch.equal(scheduled.model.get_parameter("weight"), plain.model.get_parameter("weight"))


def test_a_step_after_that_of_an_engine_is_refused_and_one_with_a_gradient_of_its_own_is_not() -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    engine = Engine(model, Square(), optimizer, device="cpu")
    batch: tuple[Tensor, Tensor] = torch.ones(2, 4), torch.ones(2)
    engine.update(batch)
    with pytest.raises(ArgumentError, match="was called after `engine"):
        optimizer.step()
    engine.update(batch)
    optimizer.zero_grad()
    model(batch[0]).sum().backward()
    optimizer.step()
    for _ in range(2):
        engine.update(batch)
    optimizer.step()  # no loop that steps by itself comes to this
