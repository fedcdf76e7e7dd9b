"""Parameter groups and tuples of optimizers: each parameter is stepped as a plain loop would."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kit
from evenstep import ParameterGroup, Training, grouped_optimizer
from evenstep.errors import ArgumentError
from evenstep.optim.optimizers import joined
from evenstep.optim.schedules import InverseSqrt
from refused import refused


def net() -> Any:
    """Linear layers `0` and `3` around a norm `2`."""
    return kit.net(nn.LayerNorm(5))


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    names = {id(one): name for name, one in model.named_parameters()}
    return {group["name"]: [names[id(one)] for one in group["params"]] for group in optimizer.param_groups}


def test_one_word_takes_weight_decay_from_biases_and_norms() -> None:
    model = net()
    made = grouped_optimizer(model, lr=0.1, weight_decay_on="matrices", options={"weight_decay": 0.2})
    assert groups_of(model, made)["others"] == ["0.weight", "3.weight"]
    assert [group["weight_decay"] for group in made.param_groups] == [0.2, 0.0]
    assert sum(len(group["params"]) for group in made.param_groups) == len([*model.parameters()])


SETTINGS: dict[str, Mapping[str, Any]] = {
    "decay": {"weight_decay_on": "matrices", "options": {"weight_decay": 0.1}},
    "rate": {"groups": {"head": ParameterGroup(patterns=("3.*",), lr=0.3)}},
    "frozen": {"groups": {"input": ParameterGroup(patterns=("0.*",), frozen=True)}},
    "options": {
        "groups": {
            "norms": ParameterGroup(patterns=("2.*",), lr_factor=3.0, weight_decay=0.0),
            "head": ParameterGroup(patterns=("3.*",), options={"betas": (0.5, 0.9)}),
        },
        "options": {"weight_decay": 0.3},
    },
}


def by_hand(name: str, setting: str) -> dict[str, Any] | None:
    """Options with which a parameter is stepped."""
    if setting == "decay":
        return {"lr": 0.05, "weight_decay": 0.1 if name in ("0.weight", "3.weight") else 0.0}
    if setting == "rate":
        return {"lr": 0.3 if name[0] == "3" else 0.05}
    if setting == "frozen":
        return None if name[0] == "0" else {"lr": 0.05}
    if name[0] == "2":
        return {"lr": 0.15000000000000002, "weight_decay": 0.0}
    return {"lr": 0.05, "weight_decay": 0.3, **({"betas": (0.5, 0.9)} if name[0] == "3" else {})}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_parameter_is_stepped_as_one_optimizer_for_it_alone_would(setting: str) -> None:
    model, reference = net(), net()
    optimizer = grouped_optimizer(model, lr=0.05, **SETTINGS[setting])
    kit.trainer_of(model, optimizer=optimizer, data=kit.data(micro=None, shuffle=False)).train()
    named = reference.named_parameters()
    alone = [torch.optim.AdamW([one], **given) for name, one in named if (given := by_hand(name, setting))]
    for update in range(6):
        x, y = kit.stacked(kit.points()[8 * (update % 3) : 8 * (update % 3) + 8])
        reference.zero_grad()
        (((reference(x).squeeze(-1) - y) ** 2).sum() / 8).backward()
        for one in alone:
            one.step()
    torch.testing.assert_close(kit.flat(model), kit.flat(reference), rtol=1e-12, atol=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two": (
        {"groups": {"a": ParameterGroup(patterns=("3.*",)), "b": ParameterGroup(patterns=("*.weight",))}},
        "patterns",
    ),
    "none": ({"groups": {"a": ParameterGroup(patterns=("heads.*",))}}, "patterns"),
    "dims": ({"groups": {"a": ParameterGroup(patterns=("3.*",), dims=3)}}, "patterns"),
    "all frozen": ({"groups": {"a": ParameterGroup(patterns=("*",), frozen=True)}}, "groups"),
    "an option": ({"groups": {"a": ParameterGroup(patterns=("3.*",), options={"momentum": 0.9})}}, "momentum"),
    "no decay": ({"optimizer": torch.optim.Rprop, "weight_decay_on": "matrices"}, "weight_decay"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    given, field = REFUSED[case]
    with refused(ArgumentError, field):
        grouped_optimizer(**{"model": net(), "lr": 0.1, **given})


def test_a_tied_parameter_is_meant_by_each_of_its_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
    model["head"].weight = model["embed"].weight
    made = grouped_optimizer(model, lr=0.1, groups={"head": ParameterGroup(patterns=("head.*",), lr_factor=3.0)})
    assert groups_of(model, made)["head"] == ["embed.weight", "head.bias"]
    both = {name: ParameterGroup(patterns=(f"{name}.*",), lr_factor=3.0) for name in ("head", "embed")}
    with refused(ArgumentError, "patterns"):
        grouped_optimizer(model, lr=0.1, groups=both)


def both(model: nn.Module, **more: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return torch.optim.Adam(matrices, lr=0.02, **more), torch.optim.AdamW(others, lr=0.01, **more)


def both_by_hand(clip_norm: float | None, **more: Any) -> Tensor:
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
    torch.testing.assert_close(kit.flat(model), both_by_hand(clip_norm, fused=fused), rtol=1e-6, atol=1e-8)


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
