"""What ranks must have in common is compared before they train."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import Hook, MapData, Trainer
from evenstep.errors import ArgumentError
from evenstep.parallel import Mesh, Single, Strategy
from evenstep.pipeline import PipelineModel
from evenstep.train import Task
from evenstep.train.checks import check_ties
from evenstep.train.state.train_state import parameter_names


class Sum(Task):
    def inputs(self, batch: Any) -> Any:
        return batch

    def loss(self, output: Any, batch: Any) -> Any:
        return output.sum()


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
        assert all("are copies of one parameter" in one for one in said)


class Freeze(Hook):
    """Freezes parameters of some names before update 2."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def before_update(self, event: Any) -> None:
        for name, one in self.trainer.model.named_parameters():
            if event.update == 2 and name in self.names:
                one.requires_grad_(False)


def trained(model: nn.Module, strategy: Strategy, *frozen: str, state: Any = None) -> Any:
    one = Trainer(
        model=model,
        task=Sum(),
        optimizer=torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1, momentum=0.9),
        data=MapData([torch.tensor([float(n), 1.0]) for n in range(6)], global_batch_size=2, micro_batch_size=1),
        updates=2 if state is None else 4,
        device="cpu",
        strategy=strategy,
        hooks=[Freeze(*frozen)],
    )
    if state is not None:
        one.load_state_dict(state)
    one.train()
    return one.state_dict()


def test_partly_frozen_copies_of_one_parameter_are_refused_on_all_ranks(
    on_ranks: Callable[..., list[Any]],
) -> None:
    def act(group: Any, *, is_built: bool) -> str:
        mesh = Mesh.of(group, pipeline=2)
        model = PipelineModel(tied(), mesh=mesh)
        for name, one in model.named_parameters():
            one.requires_grad_(not (is_built and name == "3.weight"))
        with pytest.raises(ArgumentError) as error:
            trained(model, Single(mesh.data), *(() if is_built else ("3.weight",)))
        return str(error.value)

    for is_built in (True, False):
        first, second = on_ranks(2, partial(act, is_built=is_built))
        assert first == second


def test_a_tied_parameter_that_was_frozen_in_mid_run_stays_so_in_other_stages(
    on_ranks: Callable[..., list[Any]],
) -> None:
    """Rank 0 has nothing else in its stage that is trained, and others have."""
    names = ("0.weight", "1.weight", "3.weight")

    def act(group: Any, state: Any = None) -> Any:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(tied(), mesh=mesh), Single(mesh.data), *names, state=state)

    torch.manual_seed(1)
    whole = trained(tied(), Single(), *names)
    wanted = trained(tied(), Single(), *names, state=whole)["model"]
    for begun in (whole, on_ranks(2, lambda group: act(group, {**whole}))[0]):
        gone_on = on_ranks(2, lambda group, begun=begun: act(group, begun))[0]["model"]
        assert all(torch.equal(gone_on[name], value) for name, value in wanted.items())
    assert not torch.equal(wanted["2.weight"], whole["model"]["2.weight"])
