"""Which parameters are trained is followed: what of it a checkpoint keeps, and in stages of a pipeline."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Hook, MapData, Task, Trainer, Training
from evenstep.errors import CheckpointError
from evenstep.parallel import Ddp, Mesh
from evenstep.pipeline import Layers, PipelineModel
from evenstep.precision import FullPrecision
from evenstep.train.trained import TrainedParameters

OnRanks = Callable[..., list[Any]]


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def layers() -> Layers:
    """Five linear layers, of which the second and the fourth are frozen."""

    def filled(place: int) -> nn.Module:
        linear = nn.Linear(3, 1 if place == 4 else 3)
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return linear.requires_grad_(place not in (1, 3))

    return Layers.of([lambda place=place: filled(place) for place in range(5)])


class Unfreeze(Hook):
    """Trains everything from the third update on; first_rank_only or not, it runs on all ranks."""

    def after_update(self, event: Any) -> None:
        if event.update == 2:
            self.trainer.model.requires_grad_(True)


def built(model: nn.Module, strategy: Any, **more: Any) -> Trainer:
    points = [(torch.tensor([n / 8, 1.0, -n / 4]), torch.tensor(float(n % 3))) for n in range(8)]
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
        data=MapData(points, global_batch_size=8, micro_batch_size=2),
        device="cpu",
        strategy=strategy,
        train=Training(clip_norm=0.5),
        **{"updates": 5, "hooks": [Unfreeze()], **more},
    )


def test_stages_unfreeze_as_one_process_does_and_keep_what_is_frozen(on_ranks: OnRanks) -> None:
    def act(group: Any) -> Any:
        mesh = Mesh.of(group, pipeline=2)
        trainer = built(PipelineModel(layers(), mesh=mesh), Ddp(mesh.data))
        trainer.train()
        return trainer.state_dict()

    one = built(PipelineModel(layers()), Ddp())
    one.train()
    alone, together = one.state_dict(), on_ranks(2, act)[0]
    assert all(torch.equal(value, together["model"][name]) for name, value in alone["model"].items())
    assert together["trained"] == alone["trained"]
    assert set(alone["trained"]) == set(alone["model"])
    for name, one in alone["trained"].items():
        assert one == {"now": True, "built": name[0] not in "13"}


def followed(model: nn.Module, share: Callable[[Any], None] = lambda those: None) -> TrainedParameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [[name for name, _ in model.named_parameters()]]
    reducers: Any = SimpleNamespace(share=share)
    return TrainedParameters(model, optimizer, names, reducers, FullPrecision())


def test_strategies_are_notified_only_when_the_trained_parameters_change() -> None:
    model, heard = nn.Linear(2, 2), list[int]()
    trained = followed(model, share=lambda those: heard.append(len(those)))
    for frozen in (False, True, True, False):
        model.bias.requires_grad_(not frozen)
        trained.follow()
    assert heard == [2, 1, 2]


def test_a_gradient_of_before_does_not_outlive_a_freezing() -> None:
    model = nn.Linear(2, 2)
    trained = followed(model)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.requires_grad_(False)
    trained.follow()
    assert model.bias.grad is None


def test_a_checkpoint_says_what_is_trained_and_one_that_says_nothing_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    trained = followed(model)
    begun = trained.state_dict()
    assert begun == {name: {"now": True, "built": True} for name in ("weight", "bias")}
    for before in (begun, {}):  # earlier versions noted only what had changed
        model.bias.requires_grad_(False)
        assert trained.state_dict() == {**begun, "bias": {"now": False, "built": True}}
        assert trained.changed(before) == ""
        trained.load_state_dict(before)
        assert model.bias.requires_grad


@pytest.mark.parametrize("stages", [False, True])
def test_to_go_on_with_others_frozen_is_refused_unless_it_is_meant_and_then_said(
    on_ranks: OnRanks, tmp_path: Path, stages: bool
) -> None:
    def made(group: Any, *thawed: str, updates: int = 4, hooks: Sequence[Hook] = ()) -> Trainer:
        mesh = Mesh.of(group, pipeline=2 if stages else 1)
        model = PipelineModel(layers(), mesh=mesh)
        for name, parameter in model.named_parameters():
            if name in thawed:
                parameter.requires_grad_(True)
        return built(model, Ddp(mesh.data), folder=tmp_path, updates=updates, hooks=hooks)

    def act(group: Any) -> Any:
        made(group, updates=2).train()
        with pytest.raises(CheckpointError):
            made(group, "3.weight").resume()
        meant = made(group, "3.weight")
        meant.resume(new_settings=True)
        names = dict(meant.model.named_parameters())
        return "3.weight" in names and [names[name].requires_grad for name in ("3.weight", "3.bias")]

    assert [True, False] in on_ranks(2, act)
