"""What ranks must have in common is compared before they train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Mesh
from evenstep.pipeline import PipelineModel
from evenstep.train import Engine, Task
from evenstep.train.checks.model import check_ties
from evenstep.train.state.train_state import parameter_names


def tied() -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("last", [0, 1, None])
def test_copies_of_one_parameter_must_be_in_the_same_group_on_all_ranks(
    on_ranks: Callable[..., list[Any]], last: int | None
) -> None:
    def act(group: Any) -> str:
        model = PipelineModel(tied(), mesh=Mesh.of(group, pipeline=2))
        own = dict(model.named_parameters())
        place = 0 if "0.weight" in own else last
        groups: list[dict[str, Any]] = [{"params": [], "lr": 1.0}, {"params": [], "lr": 0.1}]
        if place is not None:
            groups[place]["params"] = [own["0.weight" if "0.weight" in own else "3.weight"]]
        try:
            check_ties(model, parameter_names(model, torch.optim.SGD(groups)))
        except ArgumentError as error:
            return str(error)
        return ""

    said = on_ranks(2, act)
    if last == 0:
        assert said == ["", ""]
    else:
        where = "no group" if last is None else "group 1"
        assert all("`0.weight` and `3.weight` are one parameter" in one and where in one for one in said)


def test_a_model_in_stages_that_is_not_tied_and_a_whole_one_have_nothing_to_compare() -> None:
    check_ties(tied(), [["0.weight"]])
    check_ties(PipelineModel(tied(), stages_per_rank=2), [["0.weight", "3.weight"], ["1.weight", "2.weight"]])
    with pytest.raises(ArgumentError, match=r"in group 0 and in group 1"):
        check_ties(PipelineModel(tied(), stages_per_rank=2), [["0.weight"], ["3.weight"]])


def test_an_engine_is_not_built_of_stages_that_would_step_their_copies_otherwise(
    on_ranks: Callable[..., list[Any]],
) -> None:
    class Sum(Task):
        def loss(self, output: Any, batch: Any) -> Any:
            return output.sum()

    def act(group: Any) -> str:
        model = PipelineModel(tied(), mesh=Mesh.of(group, pipeline=2))
        own = dict(model.named_parameters())
        groups: list[dict[str, Any]] = [{"params": [], "lr": 1.0}, {"params": [], "lr": 0.1}]
        groups["0.weight" not in own]["params"] = list(own.values())
        try:
            Engine(model, Sum(), torch.optim.SGD(groups), device="cpu")
        except ArgumentError as error:
            return str(error)
        return ""

    assert all("`0.weight` and `3.weight` are one parameter" in one for one in on_ranks(2, act))
