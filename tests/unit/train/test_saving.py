"""Checkpoints of a run as its user meets them: in the background, after errors, on disks that fail."""

import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from evenstep import Checkpointing, Failures, Hook, Trainer
from evenstep.checkpoint import Mirror, complete_checkpoints, read_checkpoint, tensor_file
from evenstep.checkpoint.background import Staging
from evenstep.errors import ArgumentError, CheckpointError, EvenstepError
from evenstep.events import Save
from evenstep.parallel import Zero1
from kit import FailAt, Heard, Squares, noisy, saved_updates
from kit import trainer_of as trainer_of_kit
from same import assert_same


def trainer_of(folder: Path, *hooks: Hook, **more: Any) -> Trainer:
    return trainer_of_kit(more.pop("model", None) or noisy(), *hooks, folder=folder, **{"updates": 9} | more)


class Log(Heard):
    """Remembers updates and saves, and incidents."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def before_update(self, event: Any) -> None:
        self.heard.append(f"update {event.update}")

    def before_save(self, event: Any) -> None:
        self.heard.append(f"save {event.update}")

    def after_save(self, event: Any) -> None:
        self.heard.append(f"{'saved' if event.path is not None else 'not saved'} {event.update}")


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, save, log = threading.Event(), tensor_file.save, Log()

    def wait(path: Path, values: Any) -> None:
        assert gate.wait(20)
        save(path, values)

    class Open(Hook):
        def after_update(self, event: Any) -> None:
            if event.update == 4:
                gate.set()

    monkeypatch.setattr(tensor_file, "save", wait)
    trainer_of(tmp_path, Save(every_updates=2), Open(), log, updates=6).train()
    begun, ended = log.heard.index("save 2"), log.heard.index("saved 2")
    assert log.heard[begun + 1 : begun + 3] == ["update 3", "update 4"]
    assert log.heard.index("update 4") < ended < log.heard.index("save 4")  # at most one is under way
    assert read_checkpoint(tmp_path / "checkpoints" / "step-00000002").state["progress"]["update"] == 2


def test_all_ranks_wait_if_one_has_no_memory_for_a_copy(
    on_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, copy = threading.local(), Staging.copy

    def copied(staging: Staging, files: Any) -> Any:
        if getattr(here, "rank", 0) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return copy(staging, files)

    def act(group: Any) -> Log:
        here.rank, log = group.rank, Log()
        trainer_of(tmp_path, Save(every_updates=2), log, updates=4, strategy=Zero1(group)).train()
        return log

    monkeypatch.setattr(Staging, "copy", copied)
    for log in on_ranks(2, act):
        begun = log.heard.index("save 2")
        assert log.heard[begun : begun + 3] == ["save 2", "saved 2", "update 3"]
        assert log.kinds == ["slow_save"] * 2
    assert len(saved_updates(tmp_path)) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_save_that_fails_in_the_background_is_an_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    save, log = tensor_file.save, Log()

    def fail(path: Path, values: Any) -> None:
        if "step-00000004" in str(path):
            raise OSError(code, "the disk has failed", str(path))
        save(path, values)

    monkeypatch.setattr(tensor_file, "save", fail)
    trainer_of(tmp_path, Save(every_updates=2), log, checkpoint=Checkpointing(keep_last=None)).train()
    assert "not saved 4" in log.heard
    assert [(one.kind, one.update) for one in log.incidents] == [("save_failed", 4)]
    assert saved_updates(tmp_path) == [2, 6, 8, 9]


def test_after_an_error_the_last_committed_update_is_saved_and_resumed(tmp_path: Path) -> None:
    straight, log = trainer_of(tmp_path / "straight"), Log()
    straight.train()
    with pytest.raises(ValueError, match="injected"):
        trainer_of(tmp_path / "run", FailAt(6), log).train()
    assert saved_updates(tmp_path / "run") == [5]
    assert "emergency" in log.kinds
    trainer = trainer_of(tmp_path / "run")
    source = tmp_path / "run" / "checkpoints" / "step-00000005"
    assert trainer.resume("auto") == source
    trainer.train()
    assert read_checkpoint(tmp_path / "run").manifest.resumed_from == str(source)
    assert_same(straight.model.state_dict(), trainer.model.state_dict())


def test_an_error_inside_the_optimizer_step_leaves_no_checkpoint_of_a_half_step(tmp_path: Path) -> None:
    model = noisy()

    class Half(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.steps += 1
            if self.steps == 4:
                raise RuntimeError("in the middle")

    trainer = trainer_of(tmp_path, Save(every_updates=2), model=model, optimizer=Half(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    for use in (trainer.train, trainer.save, trainer.state_dict):
        with pytest.raises(EvenstepError):
            use()
    assert saved_updates(tmp_path) == [2]
    trainer.resume()
    assert trainer.state_dict()["progress"]["update"] == 2


def test_after_a_kernel_fault_nothing_is_read_from_the_device_and_the_error_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Any) -> int | None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be …")

    class Faulty(Hook):
        def before_update(self, event: Any) -> None:
            if event.update == 6:
                monkeypatch.setattr("evenstep.train.ledger.first_aborted", read)
                raise RuntimeError("CUDA error: device-side assert triggered")

    log = Log()
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer_of(tmp_path, Save(every_updates=2), Faulty(), log).train()
    assert saved_updates(tmp_path)[-1] == 4
    assert {"emergency", "failed"} <= set(log.kinds)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CheckpointError("the disk is gone")], ids=["hurry", "disk"])
def test_nothing_is_saved_after_ctrl_c_nor_on_a_disk_that_fails(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        trainer_of(tmp_path, FailAt(6, error)).train()
    assert saved_updates(tmp_path) == []


def test_a_damaged_newest_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    trainer_of(tmp_path, Save(every_updates=4)).train()
    file = tmp_path / "checkpoints" / "step-00000009" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    log = Log()
    trainer = trainer_of(tmp_path, Save(every_updates=4), log)
    assert trainer.resume("auto") == tmp_path / "checkpoints" / "step-00000008"
    assert len(log.incidents) == 1
    assert trainer.train().update == 9


@pytest.mark.parametrize("part", ["hook", "task"])
def test_a_failed_load_blocks_training_until_another_state_is_loaded(tmp_path: Path, part: str) -> None:
    class Refuses(Hook if part == "hook" else Squares):  # type: ignore[misc]
        refuses = False

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refuses:
                raise ValueError("not that")

    def with_part(folder: Path, one: Any, **more: Any) -> Trainer:
        return trainer_of(folder, one, **more) if part == "hook" else trainer_of(folder, task=one, **more)

    whole, refusing = with_part(tmp_path, Refuses()), Refuses()
    whole.train()
    state = whole.state_dict()
    trainer, refusing.refuses = with_part(tmp_path / "other", refusing, updates=12), True
    with pytest.raises(ValueError, match="not that"):
        trainer.load_state_dict(state)
    with pytest.raises(EvenstepError):
        trainer.train()
    refusing.refuses = False
    trainer.load_state_dict(state)
    assert trainer.train().update == 12


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_that_can_not_be_saved_is_found_after_the_first_update(tmp_path: Path, asynchronous: bool) -> None:
    class Counts(Squares):
        def state_dict(self) -> dict[str, Any]:
            return {"count": np.zeros(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    trainer = trainer_of(tmp_path, task=Counts(), checkpoint=Checkpointing(asynchronous=asynchronous))
    with pytest.raises(CheckpointError):
        trainer.train()
    assert trainer.progress.update == 1
    assert complete_checkpoints(tmp_path / "checkpoints") == []


ADDRESS = "memory://copies"


def mirrored(folder: Path, *hooks: Hook, checkpoint: Any = None, **more: Any) -> Trainer:
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
        mirrored(tmp_path / "first/run", FailAt(6)).train()
    assert copies() == [2, 4, 5]  # the last after the error
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(ArgumentError):  # a new run does not begin where another has copies
        mirrored(tmp_path / "second/run").train()
    trainer = mirrored(tmp_path / "second/run")
    assert trainer.resume() == tmp_path / "second/run/checkpoints/step-00000005"
    trainer.train()
    same_as_undisturbed(tmp_path / "second/run")
    assert copies() == [6, 8, 9]


def test_of_the_folder_and_the_copies_the_newest_is_taken(tmp_path: Path) -> None:
    mirrored(tmp_path / "run", updates=8).train()
    for name in ("step-00000008", "step-00000006"):
        shutil.rmtree(tmp_path / "run/checkpoints" / name)
    newest = tmp_path / "run/checkpoints/step-00000008"
    assert mirrored(tmp_path / "run").resume() == newest
    Mirror(ADDRESS, "run").remove("step-00000008")
    assert mirrored(tmp_path / "run").resume() == newest  # without a copy as well


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
    mirrored(tmp_path / "run", hook, task=SpoilsOnce(), **more).train()
    assert hook.left == [0, 2]
    same_as_undisturbed(tmp_path / "run")


def test_an_unreachable_mirror_does_not_restart_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: Any, **more: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "find", unreachable)
    trainer = mirrored(tmp_path / "run")
    with pytest.raises(EvenstepError):
        trainer.resume()
    with pytest.raises(CheckpointError):
        trainer.train()
    assert saved_updates(tmp_path / "run") == []
