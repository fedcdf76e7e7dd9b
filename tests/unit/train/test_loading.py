"""Weights of something else in a model: from every place, whole or in part, with nothing left unsaid."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from evenstep import Ema, MapData, PipelineModel, Task, Trainer, Training, load_weights
from evenstep.checkpoint import average_checkpoints
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.parallel import Mesh
from evenstep.pipeline import Layer, Layers
from refused import refused


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Net(nn.Module):
    """An encoder of two layers and a head; the first two weights are tied where asked."""

    def __init__(self, seed: int, *, head: int = 1, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.head = nn.Linear(3, head)
        if tied:
            self.encoder[2].weight = self.encoder[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def same(one: nn.Module, other: nn.Module, only: str = "") -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items() if name.startswith(only))


def trainer_of(model: nn.Module, folder: Path, updates: int = 2, **more: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    points = [(torch.randn(3, generator=generator), torch.randn(1, generator=generator)) for _ in range(8)]
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.05),
        data=MapData(points, global_batch_size=4),
        updates=updates,
        device="cpu",
        folder=folder,
        **more,
    )


def as_pt(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def as_training_state(model: nn.Module, folder: Path) -> Path:
    """As other trainers save it: the model under a name, other things beside it, each name behind `module.`."""
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 3, "model": weights, "optimizer": {"lr": 0.1}}, folder / "last.ckpt")
    return folder / "last.ckpt"


def as_safetensors(model: nn.Module, folder: Path) -> Path:
    save_file(model.state_dict(), folder / "any.safetensors", metadata={"format": "pt"})
    return folder / "any.safetensors"


def as_hub(model: nn.Module, folder: Path) -> Path:
    (folder / "hub").mkdir()
    save_file(model.state_dict(), folder / "hub" / "model.safetensors")
    (folder / "hub" / "config.json").write_text("{}")
    return folder / "hub"


def as_shards(model: nn.Module, folder: Path) -> Path:
    (folder / "hub").mkdir()
    places: dict[str, str] = {}
    for number, name in enumerate(model.state_dict()):
        places[name] = f"model-0000{number % 3 + 1}-of-00003.safetensors"
    for file in set(places.values()):
        some = {name: value for name, value in model.state_dict().items() if places[name] == file}
        save_file(some, folder / "hub" / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "hub" / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "hub"


def as_part(model: nn.Module, folder: Path) -> Path:
    """As a module that holds the model by a name, compiled, saves it."""
    held = {f"net._orig_mod.{name}": value for name, value in model.state_dict().items()}
    save_file(held, folder / "held.safetensors")
    return folder / "held.safetensors"


def as_run(model: nn.Module, folder: Path) -> Path:
    trainer_of(model, folder / "run").save()
    return folder / "run"


PLACES = [
    as_pt,
    as_training_state,
    as_safetensors,
    as_hub,
    as_shards,
    as_part,
    as_run,
]


@pytest.mark.parametrize("save", PLACES)
def test_weights_are_loaded_from_every_place(save: Callable[[nn.Module, Path], Path], tmp_path: Path) -> None:
    first, second = Net(1), Net(2)
    report = load_weights(second, save(first, tmp_path))
    assert same(first, second)
    assert sorted(report.loaded) == sorted(second.state_dict())
    assert report.faults() == []
    assert report.described()[0].startswith(f"weights     {len(report.loaded)} tensors from {tmp_path}")


def test_an_average_of_a_run_and_one_of_checkpoints_are_loaded_and_trained_on(tmp_path: Path) -> None:
    first = Net(1)
    trainer = trainer_of(first, tmp_path / "run", train=Training(ema=Ema(decay=0.5)))
    trainer.train()
    second = Net(2)
    load_weights(second, tmp_path / "run", average=True)
    average = trainer.state_dict()["ema"]
    assert all(torch.equal(value, average[name]) for name, value in second.state_dict().items())
    trainer.updates = 3
    trainer.train()
    steps = sorted((tmp_path / "run" / "checkpoints").iterdir())
    made = average_checkpoints(steps, tmp_path / "run" / "averages")
    third = Net(3)
    load_weights(third, made)
    trainer = trainer_of(third, tmp_path / "tuned")
    assert trainer.train().update == 2
    with pytest.raises(CheckpointError):
        trainer.resume(made)


def test_a_part_is_loaded_by_pattern_and_the_rest_stays(tmp_path: Path) -> None:
    first, second, before = Net(1), Net(2, head=5), Net(2, head=5)
    report = load_weights(second, as_pt(first, tmp_path), only="encoder.*")
    assert same(first, second, "encoder")
    assert same(before, second, "head")
    assert report.faults() == []
    assert all(name.startswith("encoder") for name in report.loaded)


def test_weights_that_do_not_fit_are_refused_by_name_and_the_advice_works(tmp_path: Path) -> None:
    state = {**Net(1, head=5).state_dict(), "decoder.weight": torch.zeros(1)}
    del state["encoder.0.bias"]
    torch.save(state, tmp_path / "other.pt")
    second, before = Net(2), Net(2)
    with pytest.raises(CheckpointError) as raised:
        load_weights(second, tmp_path / "other.pt")
    assert all(name in str(raised.value) for name in ("encoder.0.bias", "decoder.weight", "head.weight"))
    assert same(before, second)
    report = load_weights(second, tmp_path / "other.pt", partial=True)
    assert report.missing == ("encoder.0.bias",)
    assert report.unexpected == ("decoder.weight",)
    assert dict(report.other_shape) == {"head.weight": ((5, 3), (1, 3)), "head.bias": ((5,), (1,))}
    assert torch.equal(second.encoder[0].weight, state["encoder.0.weight"])
    assert same(before, second, "head")


def staged(seed: int) -> PipelineModel:
    """Two stages that tie their weights."""
    torch.manual_seed(seed)
    layers = [Layer("0", nn.Linear(2, 2)), Layer("1", nn.Linear(2, 2))]
    ties = (("0.weight", "1.weight"),)
    return PipelineModel(Layers(layers, ties=ties), stages_per_rank=2, schedule="interleaved")


@pytest.mark.parametrize(
    ("only", "left_out"), [("0.weight", ""), ("1.weight", ""), ("*.weight", "0.weight"), ("*.weight", "1.weight")]
)
def test_all_stages_load_their_copies_of_a_parameter_by_whichever_name(
    only: str, left_out: str, tmp_path: Path
) -> None:
    state = staged(1).state_dict()
    torch.save({name: one for name, one in state.items() if name != left_out}, tmp_path / "model.pt")
    model = staged(2)
    load_weights(model, tmp_path / "model.pt", only=only)
    copies = [one for name, one in model.named_parameters() if "weight" in name]
    assert all(torch.equal(one, state["0.weight"]) for one in copies)


def test_stages_load_what_they_have_and_refuse_together(tmp_path: Path, on_ranks: Callable[..., list[Any]]) -> None:
    def chain(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 1))

    first = chain(1)
    path = as_pt(first, tmp_path)
    torch.save({**first.state_dict(), "3.weight": torch.zeros(7)}, tmp_path / "other.pt")

    def act(group: Any) -> dict[str, Tensor]:
        model = PipelineModel(chain(2), mesh=Mesh.of(group, pipeline=2))
        with pytest.raises(CheckpointError):
            load_weights(model, tmp_path / "other.pt")
        assert not any(torch.equal(value, first.state_dict()[name]) for name, value in model.state_dict().items())
        load_weights(model, path)
        return {name: value.clone() for name, value in model.state_dict().items()}

    found = [one for part in on_ranks(2, act) for one in part.items()]
    assert sorted(name for name, _ in found) == sorted(first.state_dict())
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in found)


def test_names_behind_a_prefix_are_found_and_said_and_what_is_beside_them_is_named(tmp_path: Path) -> None:
    first, path = Net(1), tmp_path / "last.ckpt"
    held = {f"model.{name}": value for name, value in first.state_dict().items()}
    torch.save({"state_dict": {**held, "criterion.weight": torch.ones(2)}, "epoch": 3}, path)
    second = Net(2)
    with pytest.raises(CheckpointError):
        load_weights(second, path)
    report = load_weights(second, path, partial=True)
    assert same(first, second)
    assert report.unexpected == ("criterion.weight",)
    third = Net(3)
    load_weights(third, path, only=["encoder.*"])
    assert same(first, third, "encoder")

    torch.save({**held, **{f"teacher.{name}": value for name, value in first.state_dict().items()}}, path)
    with pytest.raises(CheckpointError):
        load_weights(second, path)


class Evil:
    """Would run something when unpickled."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # torch 2.15 says so
def test_what_can_not_be_read_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, model = as_pt(Net(1), tmp_path), Net(2)
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello world")
    (tmp_path / "cut.safetensors").write_bytes(as_safetensors(Net(1), tmp_path).read_bytes()[:-1])
    (tmp_path / "text.safetensors.index.json").write_text('{"weight_map": {"a": "../evil.safetensors"}}')
    (tmp_path / "gone.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    (tmp_path / "empty").mkdir()
    as_run(Net(1), tmp_path)
    names = "evil.pt text.pt list.pt cut.safetensors gone.safetensors.index.json empty nowhere.pt"
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names.split()]
    for name, more in [
        *cases,
        ("nowhere.pt", {"average": True}),
        (good.name, {"average": True}),
        ("run", {"average": True}),
    ]:
        with pytest.raises(CheckpointError):
            load_weights(model, tmp_path / name, **more)
    assert "executed" not in capsys.readouterr().out
    assert same(model, Net(2))
    with refused(ArgumentError, "only"):
        load_weights(model, good, only="encodr.*")


def test_a_damaged_checkpoint_is_refused_before_anything_has_changed(tmp_path: Path) -> None:
    run = as_run(Net(1), tmp_path)
    (file,) = run.glob("checkpoints/*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    model = Net(2)
    with pytest.raises(CheckpointError):
        load_weights(model, run)
    assert same(model, Net(2))


def test_files_of_averaged_models_and_of_wrapped_modules_are_taken(tmp_path: Path) -> None:
    model, fresh = Net(1), Net(2)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    torch.save(averaged.state_dict(), tmp_path / "averaged.pt")
    report = load_weights(fresh, tmp_path / "averaged.pt")
    assert report.unexpected == ()
    assert same(fresh, model)
    for prefix in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        fresh = Net(2)
        state = {name.replace("encoder.", f"encoder.{prefix}"): one for name, one in model.state_dict().items()}
        torch.save({f"{prefix}{name}": one for name, one in state.items()}, tmp_path / "wrapped.pt")
        load_weights(fresh, tmp_path / "wrapped.pt")
        assert same(fresh, model)
