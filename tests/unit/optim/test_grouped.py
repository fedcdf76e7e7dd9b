"""Parameter groups: who is in which, and that each is stepped as a plain loop over parameters would."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import MapData, ParameterGroup, Task, Trainer, grouped_optimizer
from evenstep.errors import ArgumentError
from refused import refused


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


POINTS = [
    (torch.randn(3, generator=torch.Generator().manual_seed(n)).double(), torch.tensor([n % 3 / 2]).double())
    for n in range(24)
]


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    names = {id(one): name for name, one in model.named_parameters()}
    return {group["name"]: [names[id(one)] for one in group["params"]] for group in optimizer.param_groups}


def test_one_word_takes_weight_decay_from_biases_and_norms() -> None:
    model = net()
    made = grouped_optimizer(model, lr=0.1, weight_decay_on="matrices", options={"weight_decay": 0.2})
    assert groups_of(model, made)["others"] == [
        "embed.weight",
        "blocks.0.linear.weight",
        "blocks.1.linear.weight",
        "head.weight",
    ]
    assert [group["weight_decay"] for group in made.param_groups] == [0.2, 0.0]
    assert sum(len(group["params"]) for group in made.param_groups) == len([*model.parameters()])


SETTINGS: dict[str, Mapping[str, Any]] = {
    "decay": {"weight_decay_on": "matrices", "options": {"weight_decay": 0.1}},
    "rate": {"groups": {"head": ParameterGroup(patterns=("head.*",), lr=0.3)}},
    "frozen": {"groups": {"input": ParameterGroup(patterns=("embed.*", "blocks.0.*"), frozen=True)}},
    "options": {
        "groups": {
            "norms": ParameterGroup(patterns=("*.norm.*",), lr_factor=3.0, weight_decay=0.0),
            "head": ParameterGroup(patterns=("head.*",), options={"betas": (0.5, 0.9)}),
        },
        "options": {"weight_decay": 0.3},
    },
}


def reference_rate(name: str, setting: str) -> dict[str, Any] | None:
    """What each parameter is stepped with, by hand."""
    matrix = name.endswith("weight") and "norm" not in name
    if setting == "decay":
        return {"lr": 0.05, "weight_decay": 0.1 if matrix else 0.0}
    if setting == "rate":
        return {"lr": 0.3 if "head" in name else 0.05}
    if setting == "frozen":
        return None if "embed" in name or "blocks.0" in name else {"lr": 0.05}
    if "norm" in name:
        return {"lr": 0.15000000000000002, "weight_decay": 0.0}
    return {"lr": 0.05, "weight_decay": 0.3, **({"betas": (0.5, 0.9)} if "head" in name else {})}


def assert_trained_alike(
    model: nn.Module, reference: nn.Module, alone: Sequence[torch.optim.Optimizer], *, updates: int
) -> None:
    """Train the reference in a plain loop with optimizers of its own, and compare parameters."""
    for number in range(updates):
        taken = POINTS[8 * (number % 3) : 8 * (number % 3) + 8]
        inputs, targets = (torch.stack([pair[part] for pair in taken]) for part in (0, 1))
        reference.zero_grad()
        (((reference(inputs) - targets) ** 2).sum() / 8).backward()
        for one in alone:
            one.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_parameter_is_stepped_as_one_optimizer_for_it_alone_would(setting: str) -> None:
    model, reference = net(), net()
    optimizer = grouped_optimizer(model, lr=0.05, **SETTINGS[setting])
    data = MapData(POINTS, global_batch_size=8, shuffle=False)
    Trainer(model=model, task=Square(), optimizer=optimizer, data=data, updates=6, device="cpu").train()
    alone = [
        torch.optim.AdamW([one], **given)
        for name, one in reference.named_parameters()
        if (given := reference_rate(name, setting)) is not None
    ]
    assert_trained_alike(model, reference, alone, updates=6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two": (
        {"groups": {"a": ParameterGroup(patterns=("head.*",)), "b": ParameterGroup(patterns=("*.weight",))}},
        "patterns",
    ),
    "none": ({"groups": {"a": ParameterGroup(patterns=("heads.*",))}}, "patterns"),
    "dims": ({"groups": {"a": ParameterGroup(patterns=("head.*",), dims=3)}}, "patterns"),
    "all frozen": ({"groups": {"a": ParameterGroup(patterns=("*",), frozen=True)}}, "groups"),
    "an option": ({"groups": {"a": ParameterGroup(patterns=("head.*",), options={"momentum": 0.9})}}, "momentum"),
    "no decay": ({"optimizer": torch.optim.Rprop, "weight_decay_on": "matrices"}, "weight_decay"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    given, field = REFUSED[case]
    with refused(ArgumentError, field):
        grouped_optimizer(**{"model": net(), "lr": 0.1, **given})


class Tied(nn.Module):
    """An embedding and a head of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def test_a_tied_parameter_is_meant_by_each_of_its_names() -> None:
    model = Tied()
    made = grouped_optimizer(model, lr=0.1, groups={"head": ParameterGroup(patterns=("head.*",), lr_factor=3.0)})
    assert groups_of(model, made)["head"] == ["embed.weight", "head.bias"]
    both = {name: ParameterGroup(patterns=(f"{name}.*",), lr_factor=3.0) for name in ("head", "embed")}
    with refused(ArgumentError, "patterns"):
        grouped_optimizer(Tied(), lr=0.1, groups=both)
