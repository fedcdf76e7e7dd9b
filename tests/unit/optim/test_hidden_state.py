"""What an optimizer keeps hidden is seen: tensors at once, plain values when they change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.optim import MultiOptimizer
from evenstep.optim.hidden_state import HiddenState, holds_parameters


class Own(torch.optim.SGD):
    """Whatever a test puts into its attributes."""


def made(**attributes: Any) -> Own:
    optimizer = Own([nn.Parameter(torch.zeros(2))])
    vars(optimizer).update(attributes)
    return optimizer


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        [(1, torch.zeros(2))],
        {"deep": {"deeper": [torch.zeros(2)]}},
        nn.LayerNorm(2),
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
        [torch.optim.SGD([torch.zeros(1, requires_grad=True)])],
        type("Holder", (), {"__init__": lambda self: setattr(self, "slow", torch.zeros(2))})(),
    ],
    ids=["tensor", "list", "dict", "module", "optimizer", "optimizers", "object"],
)
def test_a_tensor_for_each_parameter_or_an_optimizer_in_an_attribute_is_a_fault_at_once(value: Any) -> None:
    fault = HiddenState(made(kept=value, alpha=0.5)).fault()
    assert fault.startswith("Own keeps `kept` in attributes of its own")
    assert "`alpha`" not in fault


def test_other_tensors_are_a_fault_when_they_change_or_are_made_not_where_they_are_constants() -> None:
    optimizer = made(table=[torch.zeros(5), torch.ones(5)], code=torch.zeros(7))
    hidden = HiddenState(optimizer)
    optimizer.param_groups[0]["params"][0].data.add_(1)
    assert not hidden.fault()
    optimizer.table[1].add_(1)
    assert "keeps `table` in" in hidden.fault()
    optimizer.code = torch.zeros(7)
    assert "keeps `table`, `code` in" in hidden.fault()
    fresh = made()
    hidden = HiddenState(fresh)
    fresh.made_in_a_step = torch.zeros(3)
    assert "keeps `made_in_a_step` in" in hidden.fault()


def test_plain_values_that_steps_change_are_kept_and_come_back() -> None:
    optimizer = made(taken=0, alpha=0.5, seen=[1, {"a": None}], act=print)
    hidden = HiddenState(optimizer)
    assert hidden.values() == [{}] and not hidden.fault()
    optimizer.taken, optimizer.new = 3, "text"
    optimizer.seen.append(2)
    kept = hidden.values()
    assert kept == [{"taken": 3, "new": "text", "seen": [1, {"a": None}, 2]}]
    again = made(taken=0, alpha=0.7, seen=[1, {"a": None}])
    HiddenState(again).restore(kept)
    assert (again.taken, again.alpha, again.new, again.seen) == (3, 0.7, "text", [1, {"a": None}, 2])


def test_going_back_to_before_they_changed_undoes_the_change() -> None:
    optimizer = made(taken=0, seen=[])
    hidden = HiddenState(optimizer)
    optimizer.taken, optimizer.new = 3, 1
    optimizer.seen.append(1)
    hidden.restore([])
    assert (optimizer.taken, optimizer.seen) == (0, []) and not hasattr(optimizer, "new")


def test_where_ranks_share_the_work_they_are_a_fault() -> None:
    optimizer = made(taken=0)
    hidden = HiddenState(optimizer, shared=True)
    assert not hidden.fault()
    optimizer.taken = 1
    assert "`taken`" in hidden.fault()


def test_torchs_own_and_those_with_a_state_dict_of_their_own_keep_nothing_hidden() -> None:
    class Telling(Own):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict()

    telling = Telling([nn.Parameter(torch.zeros(2))])
    telling.kept = torch.zeros(2)
    hooked = made(kept=torch.zeros(2))
    hooked.register_state_dict_post_hook(lambda optimizer, state: state)
    assert not HiddenState(telling).fault() and not HiddenState(hooked).fault()
    assert not HiddenState(torch.optim.Adagrad([nn.Parameter(torch.zeros(2))])).fault()


def test_each_of_several_is_looked_at() -> None:
    optimizer = MultiOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), made(kept=torch.zeros(2)))
    assert "`kept`" in HiddenState(optimizer).fault()


def test_parameters_held_beside_the_groups_are_found_wherever_they_are() -> None:
    optimizer = made()
    [parameter] = optimizer.param_groups[0]["params"]
    assert holds_parameters(optimizer) == ""
    for value in ([parameter], {"p": (parameter, 1)}, torch.optim.SGD([parameter]), {parameter: 1}):
        vars(optimizer)["mine"] = value
        assert holds_parameters(optimizer) == "mine"
    vars(optimizer)["mine"] = torch.zeros(2)
    assert holds_parameters(optimizer) == ""


@pytest.mark.parametrize("fused", [False, True])
def test_what_torchs_schedulers_and_kernels_set_on_an_optimizer_is_none_of_it(fused: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = Own([parameter], fused=fused)
    hidden = HiddenState(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert hidden.values() == [{}] and not hidden.fault()


class Slow:
    def __init__(self) -> None:
        self.slow = [torch.zeros(2)]

    def follow(self, *of_torch: Any) -> None: ...


def test_what_a_step_of_somebodys_own_or_its_hooks_keep_of_each_parameter_is_a_fault() -> None:
    def of(around: Callable[[torch.optim.Optimizer], Any], *kept: Any) -> str:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))][: len(kept)])
        values, norms, step = [*kept], [torch.zeros(())], optimizer.step

        def mine(*of_torch: Any) -> None:
            step() if values else norms.clear()

        around(optimizer)(mine)
        return HiddenState(optimizer).fault()

    def instead(optimizer: torch.optim.Optimizer) -> Any:
        return lambda step: setattr(optimizer, "step", step)

    for around in (instead, lambda one: one.register_step_pre_hook, lambda one: one.register_step_post_hook):
        assert "keeps a tensor for each parameter in `values`, of which no" in of(around, torch.zeros(2))
        assert not of(around, 3.5)
        assert not of(around, torch.zeros(2), None)
    assert "in `slow`" in of(lambda one: lambda step: one.register_step_post_hook(Slow().follow), None)
