"""The table of optimizers and layouts: what each comes to, as data for tests and documentation.

An optimizer on a layout has "bits" (those of one process, also when it is stopped in the midst and resumed), or
"rounding" (the numbers of one process up to rounding), or is "refused" when the trainer is built, or does not apply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from optimizers_own import (
    Foreach,
    GlobalNorm,
    Lion,
    Lookahead,
    NeedsClosure,
    OwnReferencesTold,
    ScheduleFree,
    StateFromConstructor,
    StateInLists,
    SubclassOfSgd,
    TensorRate,
    UnsaidLion,
)
from torch import nn
from torch.optim import Optimizer

Outcome = Literal["bits", "rounding", "refused", "-"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the run is laid out.

    Args:
        name: of the column.
        ranks: how many processes.
        strategy: as `launched.strategy_named` takes it.
        stages: pipeline ranks.
        divides: what of the optimizer's work is dealt out.
    """

    name: str
    ranks: int
    strategy: str
    stages: int = 1
    divides: Literal["nothing", "parameters", "elements"] = "nothing"


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="single", ranks=1, strategy="single"),
        Layout(name="ddp", ranks=2, strategy="ddp"),
        Layout(name="ordered", ranks=2, strategy="ordered"),
        Layout(name="zero1", ranks=2, strategy="zero1", divides="parameters"),
        Layout(name="ordered-zero1", ranks=2, strategy="ordered-zero1", divides="parameters"),
        Layout(name="fsdp", ranks=2, strategy="fsdp", divides="elements"),
        Layout(name="ordered-fsdp", ranks=2, strategy="ordered-fsdp", divides="elements"),
        Layout(name="hybrid", ranks=4, strategy="hybrid", divides="elements"),
        Layout(name="ordered-hybrid", ranks=4, strategy="ordered-hybrid", divides="elements"),
        Layout(name="2 stages", ranks=2, strategy="ddp", stages=2, divides="parameters"),
        Layout(name="2 stages, zero1", ranks=4, strategy="ordered-zero1", stages=2, divides="parameters"),
        Layout(name="2 stages, fsdp", ranks=4, strategy="ordered-fsdp", stages=2, divides="elements"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One optimizer.

    Args:
        name: as in the documentation.
        build: makes it for a model, or a stage of one.
        refused: in the message that refuses it everywhere; "" where it is not.
        by_elements: the same where each rank steps a part of every parameter.
        by_parameters: the same where each rank steps some parameters.
        fused: whether its kernel rounds the ends of a tensor differently from its middle, on a CPU.
        sparse: whether the model has sparse gradients.
        fast: whether it is among those that are tried at each change.
    """

    name: str
    build: Callable[[nn.Module], Optimizer]
    refused: str = ""
    by_elements: str = ""
    by_parameters: str = ""
    fused: bool = False
    sparse: bool = False
    fast: bool = False

    def message(self, layout: Layout) -> str:
        """In the message that refuses it on `layout`; "" where it is not."""
        if self.refused:
            return self.refused
        if self.fused and layout.strategy.startswith("ordered") and layout.divides == "elements":
            return self.by_elements or "fused optimizers round the ends of a tensor"
        return {"nothing": "", "parameters": self.by_parameters, "elements": self.by_elements}[layout.divides]

    def outcome(self, layout: Layout) -> Outcome:
        """What it comes to on `layout`."""
        if self.sparse and (layout.ranks > 1 or layout.stages > 1):
            return "refused" if layout.stages == 1 else "-"
        if self.message(layout):
            return "refused"
        return "rounding" if self.fused and layout.divides == "elements" else "bits"


def of(kind: type[Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    """All parameters by one optimizer, in two groups, of which the biases have half of the learning rate."""
    lr = options.pop("lr", 0.02)

    def build(model: nn.Module) -> Optimizer:
        groups = [{"params": matrices(model)}, {"params": others(model), "lr": lr / 2}]
        if kind in (torch.optim.Muon, torch.optim.SparseAdam):
            groups.pop()
        return kind(groups, lr=lr, **options)

    return build


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


def tensor_rate(kind: type[Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), lr=torch.tensor(0.02), **options)


def two(first: Callable[..., Optimizer], second: Callable[..., Optimizer]) -> Any:
    return lambda model: (first(matrices(model)), second(others(model)))


def torch_case(kind: type[Optimizer], *, name: str = "", fast: bool = False, **options: Any) -> Case:
    shown = ", ".join(f"{key}={value}" for key, value in options.items() if key not in ("momentum", "weight_decay"))
    label = name or (f"{kind.__name__}({shown})" if shown else kind.__name__)
    fused = bool(options.get("fused"))
    by_elements = WHOLE.get(kind, "")
    if fused and kind in (torch.optim.Adagrad, torch.optim.SGD):
        by_elements = "no fused kernel of .* for shards"
    return Case(name=label, build=of(kind, **options), by_elements=by_elements, fused=fused, fast=fast)


O = torch.optim  # noqa: E741 - as short as a column
WHOLE: dict[type[Optimizer], str] = {
    O.Adafactor: "means over the rows and columns",
    O.Muon: "makes the whole matrix of an update orthogonal",
    O.Rprop: "no kernels of it for shards",
}
ELEMENTWISE = (O.Adadelta, O.Adagrad, O.Adam, O.AdamW, O.Adamax, O.ASGD, O.NAdam, O.RAdam, O.RMSprop, O.SGD)
MAXIMIZING = (O.Adadelta, O.Adagrad, O.Adam, O.AdamW, O.Adamax, O.ASGD, O.NAdam, O.RAdam, O.RMSprop, O.SGD, O.Rprop)
FUSED = (O.Adagrad, O.Adam, O.AdamW, O.SGD)

TORCH = [
    *(torch_case(kind, fast=kind in (O.Adagrad, O.NAdam)) for kind in ELEMENTWISE),
    *(torch_case(kind) for kind in (O.Adafactor, O.Muon, O.Rprop)),
    *(torch_case(kind, foreach=flag) for kind in (*ELEMENTWISE, O.Adafactor, O.Rprop) for flag in (True, False)),
    *(torch_case(kind, maximize=True) for kind in (*MAXIMIZING, O.Adafactor)),
    *(torch_case(kind, fused=True, fast=kind is O.SGD) for kind in FUSED),
    torch_case(O.Adam, amsgrad=True, weight_decay=0.1),
    torch_case(O.AdamW, amsgrad=True, foreach=True),
    torch_case(O.AdamW, amsgrad=True, fused=True),
    torch_case(O.SGD, name="SGD(momentum)", momentum=0.9, weight_decay=0.1),
    torch_case(O.SGD, name="SGD(nesterov)", momentum=0.9, nesterov=True, foreach=True),
    torch_case(O.SGD, name="SGD(momentum, fused=True)", momentum=0.9, fused=True),
    torch_case(O.RMSprop, centered=True, momentum=0.9),
    torch_case(O.RAdam, decoupled_weight_decay=True, weight_decay=0.1),
    torch_case(O.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    torch_case(O.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    *(Case(name=f"{kind.__name__}(lr=tensor)", build=tensor_rate(kind, foreach=False)) for kind in ELEMENTWISE),
    Case(name="AdamW(lr=tensor, fused=True)", build=tensor_rate(O.AdamW, fused=True), fused=True),
    Case(name="AdamW of named parameters", build=lambda model: O.AdamW(model.named_parameters(), lr=0.02)),
    Case(name="LBFGS", build=lambda model: O.LBFGS(model.parameters()), refused="evaluates the loss"),
    Case(name="SparseAdam", build=of(O.SparseAdam), sparse=True, by_elements="no kernels of it for shards"),
]
UNKNOWN = "nothing is known of"
MULTI = [
    Case(
        name="Muon + AdamW",
        build=two(lambda p: O.Muon(p, lr=0.02), lambda p: O.AdamW(p, lr=0.01)),
        by_elements="makes the whole matrix of an update orthogonal",
        fast=True,
    ),
    Case(
        name="SGD + AdamW",
        build=two(lambda p: O.SGD(p, lr=0.02, momentum=0.9), lambda p: O.AdamW(p, lr=0.01)),
    ),
    Case(
        name="Adam + AdamW, both fused",
        build=two(lambda p: O.Adam(p, lr=0.02, fused=True), lambda p: O.AdamW(p, lr=0.01, fused=True)),
        fused=True,
    ),
    Case(name="Adagrad + Lion", build=two(lambda p: O.Adagrad(p, lr=0.02), lambda p: Lion(p, lr=0.01))),
    Case(
        name="AdamW + ScheduleFree",
        build=two(lambda p: O.AdamW(p, lr=0.02), lambda p: ScheduleFree(p, lr=0.01)),
    ),
    Case(
        name="AdamW + an own one",
        build=two(lambda p: O.AdamW(p, lr=0.02), lambda p: UnsaidLion(p, lr=0.01)),
        by_elements=UNKNOWN,
        by_parameters=UNKNOWN,
    ),
]
OWN = [
    Case(name="Lion, said elementwise", build=of(Lion), fast=True),
    Case(name="Lion, not said", build=of(UnsaidLion), by_elements=UNKNOWN, by_parameters=UNKNOWN, fast=True),
    Case(name="a subclass of SGD", build=of(SubclassOfSgd), by_elements=UNKNOWN, by_parameters=UNKNOWN),
    Case(name="schedule-free with modes", build=of(ScheduleFree), fast=True),
    Case(name="Lookahead, all in its state", build=of(Lookahead)),
    Case(name="state in lists", build=of(StateInLists), fast=True),
    Case(name="state made by the constructor", build=of(StateFromConstructor), fast=True),
    Case(name="tensors in the groups", build=lambda model: TensorRate(model.parameters(), lr=0.02)),
    Case(name="own foreach", build=of(Foreach)),
    Case(
        name="own references, told by `state_dict`",
        build=of(OwnReferencesTold),
        by_elements=UNKNOWN,
        by_parameters=UNKNOWN,
        fast=True,
    ),
    Case(name="looks at all parameters at once", build=of(GlobalNorm), by_elements=UNKNOWN, by_parameters=UNKNOWN),
    Case(name="a step that needs a closure", build=of(NeedsClosure), refused="`step` of NeedsClosure needs a closure"),
]
CASES = {case.name: case for case in (*TORCH, *MULTI, *OWN)}
SHOWN = [*(case for case in TORCH if "=" not in case.name), *MULTI, *OWN]
"""What the documentation's table shows; options of the same classes are left out."""

PROVED = [name for name, case in CASES.items() if case in SHOWN or "fused=True" in name or "lr=tensor" in name]
"""What `make prove` runs: the same, and kernels and rates of other kinds."""


def documented() -> list[str]:
    """The lines of the table in docs/optimizers.md."""
    columns = ("single", "ddp", "zero1", "fsdp", "hybrid", "2 stages")
    lines = [f"| optimizer | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for case in SHOWN:
        outcomes = [case.outcome(LAYOUTS[column]) for column in columns]
        lines.append(f"| {case.name} | {' | '.join(outcomes)} |")
    return lines


MOVABLE = [
    name
    for name, case in CASES.items()
    if not (case.refused or case.by_elements or case.by_parameters or case.fused or case.sparse)
]
"""Those that no layout refuses."""
MOVES = [
    ("ordered", "ordered-zero1"),
    ("ordered-zero1", "ordered-fsdp"),
    ("ordered-fsdp", "ordered"),
    ("fsdp", "zero1"),
    ("2 stages", "ordered"),
    ("ordered-zero1", "2 stages"),
]
"""Layouts of two ranks on which a run is stopped, and on which it then goes on."""
