import io
from pathlib import Path
from typing import Any

import pytest

from evenstep.events import (
    Bus,
    Console,
    ConsoleWriter,
    EvaluateEvent,
    Incident,
    Record,
    SaveEvent,
    TrainEvent,
)
from evenstep.events.hooks import console as module


@pytest.fixture
def said(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Console, io.StringIO]:
    monkeypatch.setattr(module, "monotonic", lambda: 0.0)
    stream = io.StringIO()
    hook = Console(stream=stream)
    Bus([hook], trainer)
    trainer.folder = Path("runs/x")
    return hook, stream


def test_the_start_tells_what_is_trained_where_and_how_long(said: tuple[Console, io.StringIO], trainer: Any) -> None:
    hook, stream = said
    trainer.model.bias.requires_grad_(False)
    hook.before_train(TrainEvent(update=0, updates=100, resumed=False))
    assert stream.getvalue() == "training 6 parameters on cpu from update 0 to update 100, in runs/x\n"


def test_a_resume_without_end_and_folder_is_told_too(said: tuple[Console, io.StringIO], trainer: Any) -> None:
    hook, stream = said
    trainer.folder = None
    hook.before_train(TrainEvent(update=7, updates=None, resumed=True))
    assert stream.getvalue() == "resuming 8 parameters on cpu from update 7 until the data ends\n"


def test_evaluations_checkpoints_and_incidents_are_one_line_each(said: tuple[Console, io.StringIO]) -> None:
    hook, stream = said
    hook.before_evaluate(EvaluateEvent(update=3, name="valid"))
    hook.after_evaluate(EvaluateEvent(update=3, name="valid", metrics={"valid/loss": 1.0, "valid/accuracy": 0.5}))
    hook.after_evaluate(EvaluateEvent(update=3, name="valid", metrics={}))
    hook.after_save(SaveEvent(update=3, path=Path("runs/x/checkpoints/step-00000003")))
    hook.after_save(SaveEvent(update=4, path=None))
    hook.on_incident(Incident(kind="overflow", update=5, message="the scale was halved", details={}))
    assert stream.getvalue().splitlines() == [
        "evaluated valid after update 3, 0.0 s",
        "the evaluation of valid failed after update 3, 0.0 s",
        "saved update 3 in runs/x/checkpoints/step-00000003",
        "update 4 was not saved",
        "overflow at update 5: the scale was halved",
    ]


def test_beside_the_console_writer_an_evaluation_is_one_line_with_its_metrics(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "monotonic", lambda: 0.0)
    stream = io.StringIO()
    writer = ConsoleWriter(stream=stream)
    hook = Console(stream=stream, writer=writer)
    Bus([hook], trainer)
    writer.open(None, 0)
    hook.before_train(TrainEvent(update=0, updates=None, resumed=False))
    hook.before_evaluate(EvaluateEvent(update=3, name="valid"))
    writer.write([Record(3, "valid/loss", 1.0, 8.0), Record(3, "valid/accuracy", 0.5, 8.0)])
    hook.after_evaluate(EvaluateEvent(update=3, name="valid", metrics={"valid/loss": 1.0, "valid/accuracy": 0.5}))
    assert stream.getvalue().splitlines()[1:] == ["update 3  valid/loss 1  valid/accuracy 0.5  in 0.0 s"]


def test_the_end_tells_success_from_failure(said: tuple[Console, io.StringIO]) -> None:
    hook, stream = said
    hook.after_train(TrainEvent(update=9, outcome="done", reason="all 9 updates are done", error=None))
    hook.after_train(TrainEvent(update=9, outcome="failed", reason="", error=ValueError("too bad")))
    assert stream.getvalue().splitlines() == [
        "done, 9 updates committed, 0.0 s: all 9 updates are done",
        "failed, 9 updates committed, 0.0 s: ValueError: too bad",
    ]


def test_an_error_that_was_told_as_an_incident_is_not_told_at_the_end_again(said: tuple[Console, io.StringIO]) -> None:
    hook, stream = said
    hook.on_incident(Incident(kind="failed", update=9, message="ValueError: too bad", details={}))
    hook.after_train(TrainEvent(update=9, outcome="failed", reason="", error=ValueError("too bad")))
    assert stream.getvalue().splitlines() == [
        "failed at update 9: ValueError: too bad",
        "failed, 9 updates committed, 0.0 s",
    ]


def test_standard_output_is_looked_up_when_something_is_said(trainer: Any, capsys: Any) -> None:
    Console().on_incident(Incident(kind="overflow", update=5, message="x", details={}))
    assert capsys.readouterr().out == "overflow at update 5: x\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.94, "59.9 s"), (90, "2 min"), (3599, "1 h 0 min"), (5400, "1 h 30 min")]
)
def test_a_duration_is_told_as_people_do(
    said: tuple[Console, io.StringIO], monkeypatch: pytest.MonkeyPatch, seconds: float, text: str
) -> None:
    hook, stream = said
    monkeypatch.setattr(module, "monotonic", lambda: seconds)
    hook.after_train(TrainEvent(update=9, outcome="done", reason="x", error=None))
    assert stream.getvalue() == f"done, 9 updates committed, {text}: x\n"
