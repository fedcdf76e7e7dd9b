"""Weights of something else in a model: from every place, whole or in part, with nothing left unsaid."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from evenstep import Ema, PipelineModel, Trainer, Training, load_weights
from evenstep.checkpoint import average_checkpoints
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.parallel import Mesh
from kit import data, filled, trainer_of
from refused import refused


class Net(nn.Module):
    """An encoder of two layers and a head."""

    def __init__(self, seed: int, *, head: int = 1) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.head = nn.Linear(3, head)
        filled(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def same(one: nn.Module, other: nn.Module, only: str = "") -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items() if name.startswith(only))


def run_of(model: nn.Module, folder: Path, **more: Any) -> Trainer:
    return trainer_of(model, folder=folder, data=data(8, size=4, micro=4, dtype=torch.float32), **{"updates": 2} | more)


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
    state = model.state_dict()
    places = {name: f"model-0000{number % 3 + 1}-of-00003.safetensors" for number, name in enumerate(state)}
    for file in set(places.values()):
        save_file({name: value for name, value in state.items() if places[name] == file}, folder / "hub" / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "hub" / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "hub"


def as_wrapped(prefix: str) -> Callable[[nn.Module, Path], Path]:
    def save(model: nn.Module, folder: Path) -> Path:
        state = {name.replace("encoder.", f"encoder.{prefix}"): one for name, one in model.state_dict().items()}
        torch.save({f"{prefix}{name}": one for name, one in state.items()}, folder / "wrapped.pt")
        return folder / "wrapped.pt"

    return save


def as_run(model: nn.Module, folder: Path) -> Path:
    run_of(model, folder / "run").save()
    return folder / "run"


WRAPPED = [as_wrapped(f"{name}.") for name in ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")]
PLACES = [as_pt, as_training_state, as_safetensors, as_hub, as_shards, as_run, *WRAPPED]


@pytest.mark.parametrize("save", PLACES)
def test_weights_are_loaded_from_every_place(save: Callable[[nn.Module, Path], Path], tmp_path: Path) -> None:
    first, second = Net(1), Net(2)
    report = load_weights(second, save(first, tmp_path))
    assert same(first, second)
    assert sorted(report.loaded) == sorted(second.state_dict())
    assert report.unexpected == () and report.faults() == []


def test_an_average_of_a_run_and_one_of_checkpoints_are_loaded_and_trained_on(tmp_path: Path) -> None:
    first, second, third = Net(1), Net(2), Net(3)
    trainer = run_of(first, tmp_path / "run", train=Training(ema=Ema(decay=0.5)))
    trainer.train()
    load_weights(second, tmp_path / "run", average=True)
    average = trainer.state_dict()["ema"]
    assert all(torch.equal(value, average[name]) for name, value in second.state_dict().items())
    trainer.updates = 3
    trainer.train()
    made = average_checkpoints(sorted((tmp_path / "run" / "checkpoints").iterdir()), tmp_path / "run" / "averages")
    load_weights(third, made)
    trainer = run_of(third, tmp_path / "tuned")
    assert trainer.train().update == 2
    with pytest.raises(CheckpointError):
        trainer.resume(made)


def test_a_part_is_loaded_by_pattern_and_the_rest_stays(tmp_path: Path) -> None:
    first, second = Net(1), Net(2, head=5)
    report = load_weights(second, as_pt(first, tmp_path), only="encoder.*")
    assert same(first, second, "encoder") and same(Net(2, head=5), second, "head")
    assert report.faults() == [] and all(name.startswith("encoder") for name in report.loaded)


def test_weights_that_do_not_fit_are_refused_by_name_and_loaded_in_part(tmp_path: Path) -> None:
    state = {**Net(1, head=5).state_dict(), "decoder.weight": torch.zeros(1)}
    del state["encoder.0.bias"]
    torch.save(state, tmp_path / "other.pt")
    second = Net(2)
    with pytest.raises(CheckpointError) as raised:
        load_weights(second, tmp_path / "other.pt")
    assert all(name in str(raised.value) for name in ("encoder.0.bias", "decoder.weight", "head.weight"))
    assert same(Net(2), second)
    report = load_weights(second, tmp_path / "other.pt", partial=True)
    assert (report.missing, report.unexpected) == (("encoder.0.bias",), ("decoder.weight",))
    assert dict(report.other_shape) == {"head.weight": ((5, 3), (1, 3)), "head.bias": ((5,), (1,))}
    assert torch.equal(second.encoder[0].weight, state["encoder.0.weight"]) and same(Net(2), second, "head")


def test_stages_load_what_they_have_and_refuse_together(tmp_path: Path, on_ranks: Any) -> None:
    def chain(seed: int) -> nn.Module:
        return filled(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 1)), seed)

    state, path = chain(1).state_dict(), as_pt(chain(1), tmp_path)
    torch.save({**state, "3.weight": torch.zeros(7)}, tmp_path / "other.pt")

    def act(group: Any) -> dict[str, Tensor]:
        model = PipelineModel(chain(2), mesh=Mesh.of(group, pipeline=2))
        with pytest.raises(CheckpointError):
            load_weights(model, tmp_path / "other.pt")
        assert not any(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        load_weights(model, path)
        return {name: value.clone() for name, value in model.state_dict().items()}

    found = [one for part in on_ranks(2, act) for one in part.items()]
    assert sorted(name for name, _ in found) == sorted(state)
    assert all(torch.equal(value, state[name]) for name, value in found)


def test_weights_behind_a_prefix_are_found_unless_two_prefixes_fit(tmp_path: Path) -> None:
    first, path = Net(1), tmp_path / "last.ckpt"
    held = {f"model.{name}": value for name, value in first.state_dict().items()}
    torch.save({"state_dict": {**held, "criterion.weight": torch.ones(2)}, "epoch": 3}, path)
    second, third = Net(2), Net(3)
    with pytest.raises(CheckpointError):
        load_weights(second, path)
    assert load_weights(second, path, partial=True).unexpected == ("criterion.weight",)
    assert same(first, second)
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
def test_files_that_can_not_be_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, model = as_pt(Net(1), tmp_path), Net(2)
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello world")
    (tmp_path / "cut.safetensors").write_bytes(as_safetensors(Net(1), tmp_path).read_bytes()[:-1])
    (tmp_path / "gone.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    (tmp_path / "empty").mkdir()
    as_run(Net(1), tmp_path)
    names = "evil.pt text.pt list.pt cut.safetensors gone.safetensors.index.json empty nowhere.pt"
    averages = [(name, {"average": True}) for name in ("nowhere.pt", good.name, "run")]
    for name, more in [*((name, {}) for name in names.split()), *averages]:
        with pytest.raises(CheckpointError):
            load_weights(model, tmp_path / name, **more)
    (file,) = (tmp_path / "run").glob("checkpoints/*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError):
        load_weights(model, tmp_path / "run")
    with refused(ArgumentError, "only"):
        load_weights(model, good, only="encodr.*")
    assert "executed" not in capsys.readouterr().out
    assert same(model, Net(2))
