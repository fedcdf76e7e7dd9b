"""What can't be cut into shards is refused by name before it is, and torch's errors are told in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError, TaskError
from evenstep.parallel import Ddp, Group
from evenstep.parallel.reducer.sharded import units
from evenstep.parallel.shardable import check_shardable, explained
from evenstep.pipeline import PipelineModel


def model_of(count: int) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2) for _ in range(count)]), "head": nn.Linear(2, 1)})


def test_a_parameter_that_is_not_contiguous_is_named() -> None:
    model = model_of(2)
    model["blocks"][1].weight = nn.Parameter(torch.ones(3, 2).t())
    with pytest.raises(ArgumentError, match=r"'blocks\.1\.weight' must be contiguous"):
        check_shardable(model, units(model))


def test_a_parameter_without_elements_is_not_cut_and_so_is_no_obstacle() -> None:
    model = model_of(2)
    model["blocks"][0].extra = nn.Parameter(torch.empty(0, 2))
    check_shardable(model, units(model))


def test_parameters_of_two_formats_that_are_gathered_together_are_named() -> None:
    model = model_of(2)
    model["blocks"][0].bias.data = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"`blocks\.0\.weight` is float32 and `blocks\.0\.bias` is float64"):
        check_shardable(model, units(model))


def test_formats_may_differ_between_items_and_for_what_is_frozen() -> None:
    model = model_of(2)
    model["blocks"][0].double()
    model["head"].bias.data = torch.zeros(1, dtype=torch.bfloat16)
    model["head"].bias.requires_grad_(False)
    check_shardable(model, units(model))


def test_the_parameter_that_was_used_in_shards_is_named() -> None:
    model = model_of(1)

    def product(args: tuple[object, ...]) -> None:
        raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert")

    with pytest.raises(RuntimeError) as raised:
        product((torch.ones(2), model["blocks"][0].weight))
    found = explained(raised.value, dict(model.named_parameters()))
    assert isinstance(found, TaskError)
    assert "the model uses 'blocks.0.weight' (in `product`, test_shardable.py:" in str(found)


def test_a_second_derivative_is_told_from_other_errors() -> None:
    error = RuntimeError("setStorage: sizes [8, 8] ... are out of bounds for storage of size 0")
    assert "can't be differentiated once more" in str(explained(error, {}))
    other = RuntimeError("something else")
    assert explained(other, {}) is other


def nothing(*_: Any) -> None:
    pass


HOOKS: list[Callable[[nn.Parameter], Any]] = [
    lambda parameter: parameter.register_hook(nothing),
    lambda parameter: parameter.register_post_accumulate_grad_hook(nothing),
]


@pytest.mark.parametrize("hook", HOOKS, ids=["gradient", "accumulated"])
def test_a_hook_on_a_parameter_that_shards_would_not_call_is_refused(hook: Callable[[nn.Parameter], Any]) -> None:
    model = model_of(2)
    handle = hook(model["blocks"][1].weight)
    with pytest.raises(ArgumentError, match=r"parameter 'blocks\.1\.weight' has a hook"):
        check_shardable(model, units(model))
    handle.remove()
    check_shardable(model, units(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_part_is_refused() -> None:
    model = model_of(1)
    model["head"] = torch.jit.script(nn.Linear(2, 1))
    with pytest.raises(ArgumentError, match=r"'head' is compiled by `torch\.jit`"):
        check_shardable(model, units(model))


def test_the_hooks_of_a_trainer_of_before_are_no_fault() -> None:
    model = model_of(2)
    Ddp(Group()).reducer(model).wrap()
    check_shardable(model, units(model))


def test_a_hook_on_a_parameter_that_stages_copy_is_refused() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), last)
    first.weight.register_hook(nothing)
    with pytest.raises(ArgumentError, match=r"`weight` of Linear\(.*has a hook"):
        PipelineModel(model, stages_per_rank=2)
