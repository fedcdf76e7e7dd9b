"""What a person does with the library in a script: folders, Ctrl-C, names, loaders, mistakes, and what is said."""

import json
import os
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import library_programs
import pytest
import torch
from launched import on_ranks
from torch import nn
from torch.utils.data import (
    DataLoader,
)

from evenstep import Checkpointing, Failures, Hook, Logging, MapData, StreamData, Task, Trainer
from evenstep.checkpoint import complete_checkpoints, read_checkpoint
from evenstep.errors import ArgumentError
from evenstep.events import ConsoleWriter, CsvWriter, JsonlWriter, Save
from evenstep.optim.schedules import Cosine, Linear
from evenstep.parallel import Single
from evenstep.precision import Bf16Mixed
from evenstep.train import FailurePolicy

PAIRS = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]


class Line(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


def arguments(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    return {
        "model": model,
        "task": Line(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "data": MapData(PAIRS, global_batch_size=4),
        "updates": 4,
        "device": "cpu",
    } | more


def trainer_of(**more: Any) -> Trainer:
    return Trainer(**arguments(**more))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# A used folder.


def test_a_folder_of_another_run_is_refused_and_nothing_in_it_is_touched(tmp_path: Path) -> None:
    trainer_of(folder=tmp_path).train()
    before = files_of(tmp_path)
    with pytest.raises(ArgumentError):
        trainer_of(folder=tmp_path, updates=2).train()
    with pytest.raises(ArgumentError):
        trainer_of(folder=tmp_path).save()
    assert files_of(tmp_path) == before


def test_the_advice_about_a_used_folder_works(tmp_path: Path) -> None:
    trainer_of(folder=tmp_path).train()
    trainer = trainer_of(folder=tmp_path, updates=6)
    assert trainer.resume() == tmp_path / "checkpoints" / "step-00000004"
    assert trainer.train().update == 6
    assert trainer_of(folder=tmp_path / "another").train().update == 4


@pytest.mark.parametrize("by", ["resume", "load_state_dict"])
def test_files_later_than_the_resumed_state_are_moved_aside_in_the_run_folder(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later resume would take the checkpoint of the course that was left for the newest, and none be saved there."""
    saves = Checkpointing(every_updates=2, keep_last=2, asynchronous=False)
    trainer = trainer_of(folder=tmp_path, checkpoint=saves, updates=2)
    trainer.train()
    begun = deepcopy(trainer.state_dict())
    trainer.updates = 4
    trainer.train()
    first, last = complete_checkpoints(tmp_path / "checkpoints")
    before = files_of(last)
    for number in (1, 2):
        if by == "resume":
            trainer = trainer_of(folder=tmp_path, checkpoint=saves)
            trainer.resume(first)
        else:
            trainer.load_state_dict(begun)
        with torch.no_grad():
            trainer.model.weight.add_(number)  # another course
        trainer.train()
        assert (tmp_path / "checkpoints" / f"left-{number}-{last.name}").is_dir()
        saved = read_checkpoint(tmp_path).state["model"]
        assert torch.equal(saved["weight"], trainer.model.weight)
    assert files_of(tmp_path / "checkpoints" / f"left-1-{last.name}") == before
    assert capsys.readouterr().out.count("was renamed to `left-") == 2
    again = trainer_of(folder=tmp_path, checkpoint=saves)
    assert again.resume() == last
    assert torch.equal(again.model.weight, trainer.model.weight)


def test_a_run_that_failed_at_its_first_update_can_be_tried_again_in_its_folder(tmp_path: Path) -> None:
    class Wrong(Line):
        def loss(self, output: Any, batch: Any) -> Any:
            raise ValueError("my mistake")

    with pytest.raises(ValueError, match="my mistake"):
        trainer_of(folder=tmp_path, task=Wrong()).train()
    assert trainer_of(folder=tmp_path).train().update == 4


# What a folder alone keeps.


def test_a_folder_alone_keeps_metrics_checkpoints_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluations = MapData(PAIRS, global_batch_size=4, shuffle=False)
    trainer_of(folder=tmp_path, evaluations=evaluations, log=Logging(every_updates=2)).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["update"] for line in lines} == {1, 2, 3, 4}
    assert any("valid/loss" in line for line in lines)
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    page = (tmp_path / "report.html").read_text()
    assert "train/loss" in page and "valid/loss" in page
    said = capsys.readouterr().out
    assert "update 2/4  loss " in said and "all 4 updates are done" in said


def test_a_failed_run_gets_a_report_that_tells_why(tmp_path: Path) -> None:
    class Wrong(Line):
        def loss(self, output: Any, batch: Any) -> Any:
            if trainer.progress.update == 3:
                raise ValueError("my mistake")
            return super().loss(output, batch)

    trainer = trainer_of(folder=tmp_path, task=Wrong(), log=Logging(every_updates=1))
    with pytest.raises(ValueError, match="my mistake"):
        trainer.train()
    page = (tmp_path / "report.html").read_text()
    assert "ValueError: my mistake" in page and "train/loss" in page
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000003"]


def test_without_folder_and_writers_incidents_go_to_the_logger_of_python(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(log: Logging) -> list[str]:
        caplog.clear()
        batches = ([torch.ones(4, 1), torch.ones(4, 1)] for _ in range(2))
        trainer_of(data=StreamData(batches, batched=True), updates=3, log=log).train()
        return [record.getMessage() for record in caplog.records if record.name == "evenstep"]

    assert any("the data ended after 2 updates, before the 3" in said for said in train(Logging()))
    assert not train(Logging(writers=()))


def test_hooks_and_writers_that_are_given_take_the_place_of_the_standard_ones(tmp_path: Path) -> None:
    mine = Save(every_updates=2)
    trainer = trainer_of(folder=tmp_path, hooks=[mine], log=Logging(writers=("jsonl", CsvWriter())))
    names = [type(hook).__name__ for hook in trainer._loop.engine.bus.hooks]
    assert names == ["Timer", "Save", "StopFile", "Status"]
    assert mine in trainer._loop.engine.bus.hooks
    assert kinds_of_writers(trainer) == [JsonlWriter, CsvWriter]
    assert kinds_of_writers(trainer_of(log=Logging(writers=ConsoleWriter()))) == [ConsoleWriter]


def kinds_of_writers(trainer: Trainer) -> list[type]:
    return [type(one._writer) for one in trainer._loop.reporter.writers._writers]


# Ctrl-C and SIGTERM.

SCRIPT = """
import signal, sys, time
import torch
from evenstep import Logging, MapData, Task, Trainer

class Line(Task):
    def loss(self, output, batch):
        time.sleep(0.05)
        return ((output - batch[1]) ** 2).sum()

signal.signal(signal.SIGINT, signal.default_int_handler)
pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
model = torch.nn.Linear(1, 1)
trainer = Trainer(
    model=model,
    task=Line(),
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    data=MapData(pairs, global_batch_size=4),
    updates=100_000,
    device="cpu",
    log=Logging(every_updates=1),
    folder=sys.argv[1],
)
trainer.train()
print("went on with the script")
"""


def test_ctrl_c_in_a_script_with_a_folder_saves_and_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        assert any(line.startswith("update 2/") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGINT  # a shell says 130
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGINT")
    [saved] = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.name == f"step-{status['update']:08d}"
    assert f"run/checkpoints/{saved.name}" in err
    assert "went on with the script" not in out
    assert (tmp_path / "run" / "report.html").exists()


class Raise(Hook):
    """Sends signals to this process in the middle of an update."""

    def __init__(self, *numbers: int, at: int = 2) -> None:
        self.numbers, self.at = numbers, at

    def before_update(self, event: Any) -> None:
        if event.update == self.at:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_sigterm_saves_and_ends_the_script_with_the_exit_code_of_the_command_line(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        trainer_of(folder=tmp_path, hooks=Raise(number)).train()
    assert ended.value.code == 75
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
    assert f"evenstep: stopped by {number.name} after update 2, saved in" in capfd.readouterr().err


def test_a_second_ctrl_c_leaves_at_once_and_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer_of(folder=tmp_path, hooks=Raise(signal.SIGINT, signal.SIGINT)).train()
    assert not complete_checkpoints(tmp_path / "checkpoints")


def test_after_ctrl_c_training_again_goes_on_exactly_and_handlers_are_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    trainer = trainer_of(hooks=[Raise(signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt, match=r"stopped by Ctrl-C after update 2, with nothing saved"):
        trainer.train()
    assert trainer.progress.update == 2
    assert trainer.train().update == 4
    undisturbed = trainer_of()
    undisturbed.train()
    assert torch.equal(trainer.model.weight, undisturbed.model.weight)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        assert trainer_of(hooks=Raise(signal.SIGTERM)).train().outcome == "done"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


# Names and loaders.


@pytest.mark.parametrize(
    ("names", "objects"),
    [
        ({"precision": "bf16-mixed"}, {"precision": Bf16Mixed()}),
        ({"lr_schedule": "cosine"}, {"lr_schedule": Cosine()}),
        (
            {"lr_schedule": {"kind": "linear", "warmup_updates": 2, "end_factor": 0.5}},
            {"lr_schedule": Linear(warmup_updates=2, end_factor=0.5)},
        ),
        ({"strategy": "ddp"}, {"strategy": Single()}),
        (
            {"failures": Failures(non_finite="skip")},
            {"failures": Failures(non_finite=FailurePolicy("skip"))},
        ),
        ({"data": DataLoader(PAIRS, batch_size=4, shuffle=True)}, {}),
        ({"data": DataLoader(PAIRS, batch_size=4)}, {"data": MapData(PAIRS, global_batch_size=4, shuffle=False)}),
        (
            {
                "data": DataLoader(
                    PAIRS, batch_size=3, collate_fn=lambda some: [torch.stack(c) for c in zip(*some, strict=True)]
                )
            },
            {"data": MapData(PAIRS, global_batch_size=3, shuffle=False)},
        ),
    ],
    ids=lambda some: " ".join(some) or "default",
)
def test_a_name_and_a_loader_train_as_the_objects_they_stand_for(names: Any, objects: Any) -> None:
    trained = []
    for more in (names, objects):
        trainer = trainer_of(**more)
        trainer.train()
        trained.append(trainer.model.weight.detach().clone())
    assert torch.equal(*trained)


def test_strategies_by_name_join_the_ranks_that_were_launched_once_per_process() -> None:
    [alone] = on_ranks(1, library_programs.trained_by_name, "ddp")
    assert on_ranks(2, library_programs.trained_by_name, "zero1") == [alone, alone]


def test_ctrl_c_on_one_rank_stops_and_saves_on_all(tmp_path: Path) -> None:
    results = on_ranks(2, library_programs.interrupted, str(tmp_path))
    said = f"stopped by Ctrl-C after update 2, saved in {tmp_path}/checkpoints/step-00000002"
    assert all(result[0].startswith(said) for result in results), results
    assert [result[1:] for result in results] == [(2, ["step-00000002"])] * 2
