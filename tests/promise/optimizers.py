"""The table of optimizers: each has the bits of one process on a layout, or is refused there when it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from own_optimizers import (
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
from torch import optim as o

Parts = Literal["elements", "parameters", "model", "nothing"]


@dataclass(frozen=True, slots=True)
class Case:
    """An optimizer.

    Args:
        build: makes it for a model, or a stage of one.
        of: smallest parts that a rank may step: "elements" of parameters, "parameters", the whole "model", "nothing".
        sparse: whether it is for sparse gradients, which only one process has.
    """

    build: Callable[[nn.Module], Any]
    of: Parts = "elements"
    sparse: bool = False

    def is_refused(self, *, strategy: str, ranks: int, stages: int) -> bool:
        if self.of == "nothing" or ranks == 1:
            return self.of == "nothing"
        if self.sparse:
            return True
        if strategy in ("fsdp", "hybrid"):
            return self.of != "elements"
        return self.of == "model" and (strategy == "zero1" or stages > 1)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and other parameters."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    return [one for one in parameters if one.ndim == 2], [one for one in parameters if one.ndim != 2]


def in_groups(kind: Any, model: nn.Module, **options: Any) -> o.Optimizer:
    """All parameters in two groups, of which the second has half of the learning rate."""
    lr = options.pop("lr", 0.02)
    matrices, others = split(model)
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if others and kind is not o.Muon:
        groups.append({"params": others, "lr": lr / 2})
    return kind(groups, lr=lr, **options)


def two(first: Any, second: Any, model: nn.Module) -> tuple[o.Optimizer, o.Optimizer]:
    matrices, others = split(model)
    return first(matrices, lr=0.02), second(others, lr=0.01)


def case(kind: Any, of: Parts = "elements", **options: Any) -> Case:
    return Case(partial(in_groups, kind, **options), of)


def pair(first: Any, second: Any, of: Parts = "elements") -> Case:
    return Case(partial(two, first, second), of)


ELEMENTWISE = (o.Adadelta, o.Adagrad, o.Adam, o.AdamW, o.Adamax, o.ASGD, o.NAdam, o.RAdam, o.RMSprop, o.SGD)
OF_PARAMETERS = (o.Adafactor, o.Muon, o.Rprop)
FUSED = (o.Adagrad, o.Adam, o.AdamW, o.SGD)
CASES: dict[str, Case] = {
    **{f"{kind.__name__} in groups": case(kind) for kind in ELEMENTWISE},
    **{f"{kind.__name__} in groups": case(kind, "parameters") for kind in OF_PARAMETERS},
    **{f"{kind.__name__} foreach": case(kind, foreach=True) for kind in ELEMENTWISE},
    **{f"{kind.__name__} fused": case(kind, "parameters", fused=True) for kind in FUSED},
    **{f"{kind.__name__} maximize": case(kind, maximize=True) for kind in ELEMENTWISE},
    "Adam amsgrad": case(o.Adam, amsgrad=True, weight_decay=0.1),
    "AdamW amsgrad fused": case(o.AdamW, "parameters", amsgrad=True, fused=True),
    "SGD momentum": case(o.SGD, momentum=0.9, weight_decay=0.1),
    "SGD nesterov": case(o.SGD, momentum=0.9, nesterov=True, foreach=True),
    "RMSprop centered": case(o.RMSprop, centered=True, momentum=0.9),
    "RAdam decoupled": case(o.RAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "AdamW tensor rate": Case(lambda model: o.AdamW(model.parameters(), lr=torch.tensor(0.02), foreach=False)),
    "AdamW named": Case(lambda model: o.AdamW(model.named_parameters(), lr=0.02)),
    "LBFGS": Case(lambda model: o.LBFGS(model.parameters()), "nothing"),
    "SparseAdam": Case(lambda model: o.SparseAdam(model.parameters(), lr=0.02), sparse=True),
    "Muon + AdamW": pair(o.Muon, o.AdamW, "parameters"),
    "SGD + AdamW": pair(partial(o.SGD, momentum=0.9), o.AdamW),
    "Adam + AdamW fused": pair(partial(o.Adam, fused=True), partial(o.AdamW, fused=True), "parameters"),
    "Adagrad + Lion": pair(o.Adagrad, Lion),
    "AdamW + ScheduleFree": pair(o.AdamW, ScheduleFree),
    "AdamW + an own one": pair(o.AdamW, UnsaidLion, "model"),
    "own, elementwise": case(Lion),
    "own, not said elementwise": case(UnsaidLion, "model"),
    "own subclass of SGD": case(SubclassOfSgd, "model"),
    "own schedule-free": case(ScheduleFree),
    "own Lookahead in its state": case(Lookahead),
    "own state in lists": case(StateInLists),
    "own state of the constructor": case(StateFromConstructor),
    "own tensors in groups": Case(lambda model: TensorRate(model.parameters(), lr=0.02)),
    "own foreach": case(Foreach),
    "own references in `state_dict`": case(OwnReferencesTold, "model"),
    "own norm of all parameters": case(GlobalNorm, "model"),
    "own closure": case(NeedsClosure, "nothing"),
}
