"""Checkpoints of a run as its user meets them: in the background, after errors, on disks that fail."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, Hook, MapData, Task, Trainer
from evenstep.checkpoint import complete_checkpoints, locked, read_checkpoint, tensor_file
from evenstep.checkpoint.background import Staging
from evenstep.errors import CheckpointError, EvenstepError
from evenstep.events import Incident, Save, SaveEvent, UpdateEvent
from evenstep.parallel import Zero1


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))


def trainer_of(folder: Path, model: nn.Module | None = None, **more: Any) -> Trainer:
    model = model or network()
    points = [(torch.randn(4, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 5 / 4)) for n in range(24)]
    more.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    more.setdefault("updates", 9)
    more.setdefault("data", MapData(points, global_batch_size=8, micro_batch_size=3))
    more.setdefault("task", Square())
    return Trainer(model=model, device="cpu", folder=folder, **more)


class Log(Hook):
    """Remember what was heard of saves."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.incidents: list[Incident] = []

    def before_update(self, event: UpdateEvent) -> None:
        self.heard.append(f"update {event.update}")

    def before_save(self, event: SaveEvent) -> None:
        self.heard.append(f"save {event.update}")

    def after_save(self, event: SaveEvent) -> None:
        self.heard.append(f"{'saved' if event.path is not None else 'not saved'} {event.update}")

    def on_incident(self, event: Incident) -> None:
        self.incidents.append(event)


class FailAt(Hook):
    def __init__(self, update: int, error: BaseException) -> None:
        self.update, self.error = update, error

    def before_update(self, event: UpdateEvent) -> None:
        if event.update == self.update:
            raise self.error


def slowed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No tensors are written before the event is set."""
    gate, save = threading.Event(), tensor_file.save

    def wait(path: Path, values: Any) -> None:
        assert gate.wait(20)
        save(path, values)

    monkeypatch.setattr(tensor_file, "save", wait)
    return gate


def broken(monkeypatch: pytest.MonkeyPatch, code: int, *, names: str) -> None:
    """Checkpoints of the updates in `names` cannot be written."""
    save = tensor_file.save

    def fail(path: Path, values: Any) -> None:
        if any(name in str(path) for name in names.split()):
            raise OSError(code, "the disk has failed", str(path))
        save(path, values)

    monkeypatch.setattr(tensor_file, "save", fail)


def states(folder: Path) -> list[Any]:
    return [read_checkpoint(path).state for path in complete_checkpoints(folder / "checkpoints")]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, log = slowed(monkeypatch), Log()

    class Open(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.update == 4:
                gate.set()

    trainer_of(tmp_path, hooks=[Save(every_updates=2), Open(), log], updates=6).train()
    begun, ended = log.heard.index("save 2"), log.heard.index("saved 2")
    assert log.heard[begun + 1 : begun + 3] == ["update 3", "update 4"]
    assert ended > log.heard.index("update 4")
    # at most one is under way: the next one waits for it
    assert log.heard.index("save 4") > ended
    progress: Any = read_checkpoint(tmp_path / "checkpoints" / "step-00000002").state["progress"]
    assert progress["update"] == 2


def no_memory_on(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    """There is no memory for a copy of a state on these ranks, whose threads say which they are."""

    copy = Staging.copy

    def copied(staging: Staging, files: Any) -> Any:
        if getattr(RANK, "number", 0) in ranks:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return copy(staging, files)

    monkeypatch.setattr(Staging, "copy", copied)


RANK = threading.local()


def test_all_ranks_wait_if_one_has_no_memory_for_a_copy(
    on_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory_on(monkeypatch, 1)

    def act(group: Any) -> tuple[list[str], list[str]]:
        RANK.number, log = group.rank, Log()
        hooks = [Save(every_updates=2), log]
        trainer_of(tmp_path, hooks=hooks, updates=4, strategy=Zero1(group)).train()
        begun = log.heard.index("save 2")
        return log.heard[begun : begun + 3], [one.message for one in log.incidents if one.kind == "slow_save"]

    for heard, messages in on_ranks(2, act):
        assert heard == ["save 2", "saved 2", "update 3"]
        assert len(messages) == 2
        assert "on rank 1)" in messages[0]
    assert len(states(tmp_path)) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_save_that_fails_in_the_background_is_an_incident_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    broken(monkeypatch, code, names="step-00000004")
    log = Log()
    trainer_of(tmp_path, hooks=[Save(every_updates=2), log], checkpoint=Checkpointing(keep_last=None)).train()
    assert "not saved 4" in log.heard
    (incident,) = log.incidents
    assert (incident.kind, incident.update) == ("save_failed", 4)
    assert errno.errorcode[code] in incident.message
    assert "Training goes on; the next save tries again." in incident.message
    assert [state["progress"]["update"] for state in states(tmp_path)] == [2, 6, 8, 9]


def test_after_an_error_the_last_committed_update_is_saved_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    straight, log = network(), Log()
    trainer_of(tmp_path / "straight", straight).train()
    with pytest.raises(ValueError, match="no more"):
        trainer_of(tmp_path / "run", hooks=[FailAt(6, ValueError("no more")), log]).train()
    assert states(tmp_path / "run")[-1]["progress"]["update"] == 5
    [saved] = [incident for incident in log.incidents if incident.kind == "emergency"]
    assert "the state after update 5 is saved in" in saved.message
    model = network()
    trainer = trainer_of(tmp_path / "run", model, hooks=[])
    assert trainer.resume("auto") == tmp_path / "run" / "checkpoints" / "step-00000005"
    trainer.train()
    last = read_checkpoint(tmp_path / "run")
    assert last.manifest.resumed_from == str(tmp_path / "run" / "checkpoints" / "step-00000005")
    for name, value in straight.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_an_error_inside_the_optimizer_step_leaves_no_checkpoint_of_a_half_step(tmp_path: Path) -> None:
    model, log = network(), Log()

    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 4:
                raise RuntimeError("out of memory in the middle")

    optimizer = Half(model.parameters(), lr=0.1)
    trainer = trainer_of(tmp_path, model, optimizer=optimizer, hooks=[Save(every_updates=2), log])
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    assert [state["progress"]["update"] for state in states(tmp_path)] == [2]
    assert any("the newest checkpoint stands" in incident.message for incident in log.incidents)
    for use in (trainer.train, trainer.save, trainer.state_dict):
        with pytest.raises(EvenstepError):
            use()
    assert [state["progress"]["update"] for state in states(tmp_path)] == [2]
    trainer.resume()
    assert trainer.state_dict()["progress"]["update"] == 2


def test_after_a_kernel_fault_nothing_is_read_from_the_device_and_the_error_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Any) -> int | None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be …")

    log = Log()

    class Faulty(Hook):
        def before_update(self, event: UpdateEvent) -> None:
            if event.update == 6:
                monkeypatch.setattr("evenstep.train.ledger.first_aborted", read)
                raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert") as raised:
        trainer_of(tmp_path, hooks=[Save(every_updates=2), Faulty(), log]).train()
    assert any("can't be read any more (CUDA error: device-side assert" in note for note in raised.value.__notes__)
    assert states(tmp_path)[-1]["progress"]["update"] == 4
    told = [incident.message for incident in log.incidents if incident.kind == "emergency"]
    assert any("can't be read any more" in one and "the newest checkpoint stands" in one for one in told)
    assert any(incident.kind == "failed" for incident in log.incidents)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CheckpointError("the disk is gone")], ids=["hurry", "disk"])
def test_nothing_is_saved_for_whoever_is_in_a_hurry_nor_on_a_disk_that_fails(
    tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        trainer_of(tmp_path, hooks=[FailAt(6, error)]).train()
    assert states(tmp_path) == []


def test_two_runs_in_one_folder_are_refused_and_the_first_is_not_harmed(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CheckpointError):
        trainer_of(tmp_path).train()
    assert list(tmp_path.iterdir()) == []
    trainer_of(tmp_path).train()


def test_a_damaged_newest_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    trainer_of(tmp_path, hooks=[Save(every_updates=4)]).train()
    file = tmp_path / "checkpoints" / "step-00000009" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    log = Log()
    trainer = trainer_of(tmp_path, hooks=[Save(every_updates=4), log])
    assert trainer.resume("auto") == tmp_path / "checkpoints" / "step-00000008"
    assert "step-00000009" in log.incidents[0].message
    assert trainer.train().update == 9


def test_a_failed_load_of_a_hook_blocks_training_until_another_state_is_loaded(tmp_path: Path) -> None:
    class Refuses(Hook):
        refuses = True

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refuses:
                raise ValueError("not that")

    whole = trainer_of(tmp_path, hooks=[Refuses()])
    whole.train()
    state, hook = whole.state_dict(), Refuses()
    trainer = trainer_of(tmp_path / "other", hooks=[hook], updates=12)
    with pytest.raises(ValueError, match="not that"):
        trainer.load_state_dict(state)
    with pytest.raises(EvenstepError):
        trainer.train()
    hook.refuses = False
    trainer.load_state_dict(state)
    assert trainer.train().update == 12


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_that_can_not_be_saved_is_found_after_the_first_update(tmp_path: Path, asynchronous: bool) -> None:
    class Counts(Square):
        def state_dict(self) -> dict[str, Any]:
            return {"count": np.zeros(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    trainer = trainer_of(tmp_path, task=Counts(), checkpoint=Checkpointing(asynchronous=asynchronous))
    with pytest.raises(CheckpointError):
        trainer.train()
    assert trainer.progress.update == 1
