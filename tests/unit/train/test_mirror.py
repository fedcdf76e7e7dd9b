"""A run whose folder is lost goes on from copies of its checkpoints, to the same bits."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor, nn

from evenstep import Checkpointing, Failures, Hook, MapData, Task, Trainer
from evenstep.checkpoint import Mirror, complete_checkpoints, read_checkpoint
from evenstep.errors import ArgumentError, CheckpointError, EvenstepError
from evenstep.events import Incident, UpdateEvent

ADDRESS = "memory://copies"


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def trainer_of(folder: Path | None, *hooks: Hook, task: Task | None = None, **more: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    points = [(torch.randn(4, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 5 / 4)) for n in range(24)]
    return Trainer(
        model=model,
        task=task or Square(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        data=MapData(points, global_batch_size=8, micro_batch_size=3),
        device="cpu",
        folder=folder,
        hooks=hooks,
        updates=more.pop("updates", 9),
        checkpoint=Checkpointing(**{"every_updates": 2, "mirror": ADDRESS} | more.pop("checkpoint", {})),
        **more,
    )


class FailAt(Hook):
    def __init__(self, update: int) -> None:
        self.update = update

    def before_update(self, event: UpdateEvent) -> None:
        if event.update == self.update:
            raise RuntimeError("the machine is on fire")


@pytest.fixture(autouse=True)
def store() -> Iterator[dict[str, Any]]:
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, Any]:
    trainer = trainer_of(tmp_path / "undisturbed")
    trainer.train()
    return read_checkpoint(tmp_path / "undisturbed").state["model"]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_whose_folder_is_lost_goes_on_from_the_newest_copy(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="on fire"):
        trainer_of(tmp_path / "first/run", FailAt(6)).train()
    copies = Mirror(ADDRESS, "run")
    assert copies.steps() == ["step-00000002", "step-00000004", "step-00000005"]  # the last after the error
    shutil.rmtree(tmp_path / "first")
    trainer = trainer_of(tmp_path / "second/run")
    assert trainer.resume() == tmp_path / "second/run/checkpoints/step-00000005"
    trainer.train()
    assert same(read_checkpoint(tmp_path / "second/run").state["model"], undisturbed)
    assert copies.steps() == ["step-00000006", "step-00000008", "step-00000009"]


def test_of_the_folder_and_the_copies_the_newest_is_taken(tmp_path: Path) -> None:
    trainer_of(tmp_path / "run", updates=8).train()
    for name in ("step-00000008", "step-00000006"):
        shutil.rmtree(tmp_path / "run/checkpoints" / name)
    trainer = trainer_of(tmp_path / "run")
    assert trainer.resume() == tmp_path / "run/checkpoints/step-00000008"
    Mirror(ADDRESS, "run").remove("step-00000008")
    trainer = trainer_of(tmp_path / "run")
    assert trainer.resume() == tmp_path / "run/checkpoints/step-00000008"  # without a copy as well


def test_a_new_run_does_not_begin_where_another_has_copies(tmp_path: Path) -> None:
    trainer_of(tmp_path / "first/run", updates=2).train()
    with pytest.raises(ArgumentError):
        trainer_of(tmp_path / "second/run").train()
    assert trainer_of(tmp_path / "second/run").resume() is not None  # as the error says


def test_a_rewind_removes_the_copies_of_what_did_not_happen(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    class SpoilOnce(Square):
        spoiled = False

        def loss(self, output: Any, batch: Any) -> Tensor:
            loss = super().loss(output, batch)
            if seen.update == 6 and not self.spoiled:
                self.spoiled = True
                return loss * float("nan")
            return loss

    class Seen(Hook):
        update = 0
        copies: tuple[str, ...] = ()

        def before_update(self, event: UpdateEvent) -> None:
            self.update = event.update

        def on_incident(self, event: Incident) -> None:
            if event.kind == "rewind":
                self.copies = tuple(Mirror(ADDRESS, "run").steps())

    class Damage(Hook):
        def before_update(self, event: UpdateEvent) -> None:
            if event.update == 6 and not task.spoiled:
                damaged.write_bytes(damaged.read_bytes()[:-1] + b" ")

    seen, task = Seen(), SpoilOnce()
    damaged = tmp_path / "run/checkpoints/step-00000004/state.json"
    trainer_of(
        tmp_path / "run",
        seen,
        Damage(),
        task=task,
        failures=Failures(non_finite="rewind"),
        checkpoint={"asynchronous": False},
    ).train()
    assert task.spoiled
    assert seen.copies == ("step-00000000", "step-00000002")
    assert same(read_checkpoint(tmp_path / "run").state["model"], undisturbed)


def test_an_unreachable_mirror_does_not_restart_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **more: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "find", unreachable)
    trainer = trainer_of(tmp_path / "run")
    with pytest.raises(EvenstepError):
        trainer.resume()
    with pytest.raises(CheckpointError):
        trainer.train()
    assert complete_checkpoints(tmp_path / "run/checkpoints") == []
