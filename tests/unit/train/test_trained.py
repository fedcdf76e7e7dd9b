"""Which parameters are trained is followed: by checkpoints, in stages of a pipeline, and for copies of a parameter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import Hook, Task, Trainer, Training
from evenstep.errors import ArgumentError, CheckpointError, EvenstepError
from evenstep.parallel import Ddp, Mesh, Single, Strategy
from evenstep.pipeline import PipelineModel
from evenstep.train.agreement import check_ties
from evenstep.train.state.optimizer_state import parameter_names
from kit import data, filled, trainer_of


def layers() -> nn.Sequential:
    """Five linear layers, of which the second and the fourth are frozen."""
    made = filled(nn.Sequential(*(nn.Linear(3, 1 if place == 4 else 3) for place in range(5))))
    for place in (1, 3):
        made[place].requires_grad_(False)
    return made


def built(model: nn.Module, *hooks: Hook, **more: Any) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    some = data(8, micro=2, dtype=torch.float32)
    return trainer_of(model, *hooks, data=some, optimizer=optimizer, train=Training(clip_norm=0.5), **more)


@pytest.mark.parametrize("stages", [1, 2])
def test_to_go_on_with_others_frozen_is_refused_unless_it_is_meant(on_ranks: Any, tmp_path: Path, stages: int) -> None:
    def made(group: Any, *thawed: str, **more: Any) -> Trainer:
        mesh = Mesh.of(group, pipeline=stages)
        model = PipelineModel(layers(), mesh=mesh)
        for name, parameter in model.named_parameters():
            if name in thawed:
                parameter.requires_grad_(True)
        return built(model, strategy=Ddp(mesh.data), folder=tmp_path, **{"updates": 4} | more)

    def act(group: Any) -> Any:
        made(group, updates=2).train()
        with pytest.raises(CheckpointError):
            made(group, "3.weight").resume()
        meant = made(group, "3.weight")
        meant.resume(new_settings=True)
        return {name: one.requires_grad for name, one in meant.model.named_parameters() if name.startswith("3")}

    assert {"3.weight": True, "3.bias": False} in on_ranks(2, act)


class Sum(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return output.sum()


def tied() -> nn.Sequential:
    model = filled(nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(4)]))
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("last", [0, 1, None])
def test_copies_of_one_parameter_must_be_in_the_same_group_on_all_ranks(on_ranks: Any, last: int | None) -> None:
    def act(group: Any) -> bool:
        model = PipelineModel(tied(), mesh=Mesh.of(group, pipeline=2))
        own = dict(model.named_parameters())
        name, place = ("0.weight", 0) if "0.weight" in own else ("3.weight", last)
        groups: list[dict[str, Any]] = [{"params": [], "lr": 1.0}, {"params": [], "lr": 0.1}]
        if place is not None:
            groups[place]["params"] = [own[name]]
        try:
            check_ties(model, parameter_names(model, torch.optim.SGD(groups)))
        except ArgumentError:
            return False
        return True

    assert on_ranks(2, act) == [last == 0] * 2


class Freeze(Hook):
    """Freezes parameters of some names before update 2."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def before_update(self, event: Any) -> None:
        for name, one in self.trainer.model.named_parameters():
            if event.update == 2 and name in self.names:
                one.requires_grad_(False)


def trained(model: nn.Module, strategy: Strategy, *frozen: str, state: Any = None) -> Any:
    some = data(6, size=2, micro=1, dtype=torch.float32)
    updates = 2 if state is None else 4
    one = trainer_of(model, Freeze(frozen), task=Sum(), data=some, updates=updates, strategy=strategy)
    if state is not None:
        one.load_state_dict(state)
    one.train()
    return one.state_dict()


@pytest.mark.parametrize("is_built", [True, False])
def test_partly_frozen_copies_of_one_parameter_are_refused_on_all_ranks(on_ranks: Any, is_built: bool) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        model = PipelineModel(tied(), mesh=mesh)
        for name, one in model.named_parameters():
            one.requires_grad_(not (is_built and name == "3.weight"))
        with pytest.raises(EvenstepError):
            trained(model, Single(mesh.data), *(() if is_built else ("3.weight",)))

    on_ranks(2, act)


def test_a_tied_parameter_that_was_frozen_in_mid_run_stays_so_in_other_stages(on_ranks: Any) -> None:
    """Rank 0 has nothing else in its stage that is trained, and others have."""
    names = ("0.weight", "1.weight", "3.weight")

    def act(group: Any, state: Any = None) -> Any:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(tied(), mesh=mesh), Single(mesh.data), *names, state=state)

    whole = trained(tied(), Single(), *names)
    wanted = trained(tied(), Single(), *names, state=whole)["model"]
    for begun in (whole, on_ranks(2, lambda group: act(group, whole))[0]):
        gone_on = on_ranks(2, lambda group, begun=begun: act(group, begun))[0]["model"]
        assert all(torch.equal(gone_on[name], value) for name, value in wanted.items())
    assert not torch.equal(wanted["2.weight"], whole["model"]["2.weight"])
