"""Whether an optimizer can be stepped exactly on these ranks, and be resumed: asked when a trainer is built.

What can't be told before a step, an optimizer that counts steps in an attribute of its own, is asked after the first
one (`first_step`). Nothing is asked again in later updates.
"""

import ast
import inspect
import math
from collections.abc import Mapping
from numbers import Real
from textwrap import dedent
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.checkpoint.state import pack
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.names import parameters_in
from evenstep.optim.multi import inner
from evenstep.optim.sharing import TORCH, TORCHAO, Granularity, is_of_torchao, tells_itself, why_not_by
from evenstep.parallel import ParameterLayout, Strategy
from evenstep.pipeline.pipeline_model import in_stages
from evenstep.train.state.optimizer_state import plain_numbers
from evenstep.train.state.train_state import is_shared


def check_optimizer(
    optimizer: Optimizer, *, model: nn.Module, strategy: Strategy, device: torch.device, keeps: bool
) -> None:
    """Raise ArgumentError for an optimizer that this run could not step, share or resume exactly."""
    for one in inner(optimizer):
        _check_step(one, device)
    if is_shared(model, strategy.layout):
        _check_shared(optimizer, strategy.layout, stages=in_stages(model))
    _check_saved(optimizer, strategy.layout, keeps=keeps)


def _check_step(optimizer: Optimizer, device: torch.device) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "`optimizer` must take its step from one gradient, but LBFGS evaluates the loss several times per step; "
            "use any other optimizer of torch.optim."
        )
    if _needs_closure(type(optimizer)):
        raise ArgumentError(
            f"`optimizer` must take its step from one gradient, but `step` of {name} needs a closure that evaluates "
            f"the loss again; use an optimizer whose step does not."
        )
    if type(optimizer).__module__.startswith("torchao.optim"):
        _check_torchao(optimizer)
    groups: list[dict[str, Any]] = optimizer.param_groups
    for number, group in enumerate(groups):
        _check_numbers(group, f"the group {number} of {name}")
    if device.type == "cpu" and any(group.get("capturable") for group in groups):
        raise ArgumentError(
            f"{name} was built with `capturable=True`, which is for accelerators, but the run is on the CPU; leave it "
            f"out."
        )
    if any(group.get("differentiable") for group in groups):
        raise ArgumentError(
            f"{name} was built with `differentiable=True`, for a step that gradients flow through, but an update "
            f"changes the parameters themselves; leave it out."
        )


def _check_numbers(group: Mapping[str, Any], whose: str) -> None:
    """Raise ArgumentError for numbers that no step can be made with; torch asks those of no single group."""
    for option, given in group.items():
        value: Any = given.item() if isinstance(given, torch.Tensor) and given.numel() == 1 else given
        if not isinstance(value, Real):
            continue
        number, scales = float(value), option in ("lr", "weight_decay")
        if math.isnan(number) or (scales and not 0.0 <= number < math.inf):
            must = "a number in [0, inf)" if scales else "a number"
            raise ArgumentError(f"`{option}` of {whose} must be {must}, but is {number}; give it such a one.")


def _needs_closure(kind: type[Optimizer]) -> bool:
    """Whether a step can't be taken without a closure, also where its signature says that it can (SAM)."""
    step: Any = inspect.unwrap(kind.step)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None or kind in TORCH:
        return False
    if closure.default is inspect.Parameter.empty:
        return True
    try:
        nodes = [*ast.walk(ast.parse(dedent(inspect.getsource(step))))]
    except (OSError, TypeError, SyntaxError):  # it does not tell
        return False
    asked = [node for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.While)]
    tests = [(node, ast.unparse(node.test)) for node in asked]
    tests += [(node, ast.unparse(node)) for node in nodes if isinstance(node, ast.BoolOp)]
    tests = [(node, test) for node, test in tests if "closure" in test]
    return (
        any(isinstance(node, ast.Assert) and test in ("closure", "closure is not None") for node, test in tests)
        or any(
            isinstance(node, ast.If)
            and test in ("closure is None", "not closure")
            and isinstance(node.body[-1], ast.Raise)
            for node, test in tests
        )
        or (not tests and any(isinstance(node, ast.Call) and ast.unparse(node.func) == "closure" for node in nodes))
    )


def _check_torchao(optimizer: Optimizer) -> None:
    """Raise ArgumentError for what torchao's optimizers do beside stepping each parameter in the same way each time."""
    name = type(optimizer).__name__
    if not is_of_torchao(optimizer):
        raise ArgumentError(
            f"{name} of torchao is none of those that are known to step and resume exactly, "
            f"{', '.join(one.rpartition('.')[2] for one in TORCHAO)}; take one of these, or one of torch.optim."
        )
    if getattr(optimizer, "bf16_stochastic_round", False):
        raise ArgumentError(
            f"{name} was built with `bf16_stochastic_round=True`, which draws random numbers that a resumed run would "
            f"not draw again; leave it out, and let `precision` say how 16-bit parameters are stepped "
            f"(`bf16-true-no-master` rounds by keyed randomness)."
        )


def _check_shared(optimizer: Optimizer, layout: ParameterLayout, *, stages: bool) -> None:
    shards = layout.divides == "elements"
    part = Granularity.ELEMENT if shards else Granularity.PARAMETER
    cut = (
        "with `fsdp` each rank steps a part of every parameter"
        if shards
        else "with `zero1` each rank steps some of the parameters"
        if layout.divides == "parameters"
        else "in a pipeline each rank steps the parameters of its own stages"
    )
    other = (
        "share by whole parameters with `zero1`, or not at all with `ddp`" if shards else "let `ddp` share gradients"
    )
    advice = "train without stages" if stages and not shards else f"else {other}"
    why = why_not_by(part, optimizer)
    if why:
        raise ArgumentError(f"{cut}, but {why}; {advice}.")
    told = [type(one).__name__ for one in inner(optimizer) if tells_itself(one)]
    if told:
        raise ArgumentError(
            f"{cut}, and their states make up a checkpoint, but {told[0]} has a `state_dict` of its own, of which "
            f"the parts can't be put together; let it keep its state per parameter in `state`, {advice}."
        )


def _check_saved(optimizer: Optimizer, layout: ParameterLayout, *, keeps: bool) -> None:
    """Raise ArgumentError for options, and for state in parts, that no file has a format for."""
    for number, group in enumerate(optimizer.param_groups if keeps else ()):
        options = {name: plain_numbers(value) for name, value in group.items() if name != "params"}
        try:
            pack(options, f"param_groups[{number}]")
        except CheckpointError as error:
            raise ArgumentError(f"a run with a `folder` saves checkpoints, but of the optimizer {error}") from error
    wide = any(one.dtype == torch.complex128 for one in parameters_in(optimizer))
    if keeps and wide and layout.divides == "parameters":
        raise ArgumentError(
            "a run with a `folder` saves checkpoints, to which with `zero1` each rank gives the state of some "
            "parameters, and no safetensors file has complex128; make those parameters complex64, or let `ddp` share "
            "gradients."
        )
