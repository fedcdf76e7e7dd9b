"""A run whose folder is lost goes on from copies of its checkpoints, to the same bits."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from evenstep import Checkpointing, Failures, Hook, Trainer
from evenstep.checkpoint import Mirror, read_checkpoint
from evenstep.errors import ArgumentError, CheckpointError, EvenstepError
from kit import FailAt, Heard, Squares, noisy, saved_updates
from kit import trainer_of as trainer_of_kit
from same import assert_same

ADDRESS = "memory://copies"


def trainer_of(folder: Path, *hooks: Hook, checkpoint: Any = None, **more: Any) -> Trainer:
    checkpoint = Checkpointing(every_updates=2, mirror=ADDRESS, **(checkpoint or {}))
    return trainer_of_kit(noisy(), *hooks, folder=folder, checkpoint=checkpoint, **{"updates": 9} | more)


@pytest.fixture(autouse=True)
def _store() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def same_as_undisturbed(folder: Path) -> None:
    undisturbed = trainer_of_kit(noisy(), updates=9)
    undisturbed.train()
    assert_same(read_checkpoint(folder).state["model"], undisturbed.model.state_dict())


def copies() -> list[int]:
    return [int(name.removeprefix("step-")) for name in Mirror(ADDRESS, "run").steps()]


def test_a_run_whose_folder_is_lost_goes_on_from_the_newest_copy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="injected"):
        trainer_of(tmp_path / "first/run", FailAt(6)).train()
    assert copies() == [2, 4, 5]  # the last after the error
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(ArgumentError):  # a new run does not begin where another has copies
        trainer_of(tmp_path / "second/run").train()
    trainer = trainer_of(tmp_path / "second/run")
    assert trainer.resume() == tmp_path / "second/run/checkpoints/step-00000005"
    trainer.train()
    same_as_undisturbed(tmp_path / "second/run")
    assert copies() == [6, 8, 9]


def test_of_the_folder_and_the_copies_the_newest_is_taken(tmp_path: Path) -> None:
    trainer_of(tmp_path / "run", updates=8).train()
    for name in ("step-00000008", "step-00000006"):
        shutil.rmtree(tmp_path / "run/checkpoints" / name)
    newest = tmp_path / "run/checkpoints/step-00000008"
    assert trainer_of(tmp_path / "run").resume() == newest
    Mirror(ADDRESS, "run").remove("step-00000008")
    assert trainer_of(tmp_path / "run").resume() == newest  # without a copy as well


def test_a_rewind_removes_the_copies_of_updates_that_did_not_happen(tmp_path: Path) -> None:
    damaged = tmp_path / "run/checkpoints/step-00000004/state.json"

    class SpoilsOnce(Squares):
        spoiled = False

        def loss(self, output: Any, batch: Any) -> Any:
            spoils = self.now.is_training and self.now.update == 6 and not self.spoiled
            self.spoiled = self.spoiled or spoils
            return super().loss(output, batch) * (float("nan") if spoils else 1.0)

    class Damage(Heard):
        left: list[int] = []  # noqa: RUF012

        def before_update(self, event: Any) -> None:
            if event.update == 6 and not self.left:
                damaged.write_bytes(damaged.read_bytes()[:-1] + b" ")

        def on_incident(self, event: Any) -> None:
            if event.kind == "rewind":
                self.left = copies()

    hook = Damage()
    more: dict[str, Any] = {"failures": Failures(non_finite="rewind"), "checkpoint": {"asynchronous": False}}
    trainer_of(tmp_path / "run", hook, task=SpoilsOnce(), **more).train()
    assert hook.left == [0, 2]
    same_as_undisturbed(tmp_path / "run")


def test_an_unreachable_mirror_does_not_restart_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **more: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "find", unreachable)
    trainer = trainer_of(tmp_path / "run")
    with pytest.raises(EvenstepError):
        trainer.resume()
    with pytest.raises(CheckpointError):
        trainer.train()
    assert saved_updates(tmp_path / "run") == []
