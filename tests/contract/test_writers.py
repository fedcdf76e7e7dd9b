"""The battery that every shipped writer must pass."""

import csv
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep import events
from evenstep.events import Image, Incident, Record, Shown, Storage, Text, TrainEvent, Writer, Writers

Values = dict[tuple[int, str], float]


def read_jsonl(folder: Path) -> Values:
    values: Values = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        update = row.pop("update")
        assert not any((update, name) in values for name in row), "written twice"
        values |= {(update, name): float(value) for name, value in row.items()}
    return values


def read_csv(folder: Path) -> Values:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values = {(int(row["update"]), row["name"]): float(row["value"]) for row in rows}
    assert len(values) == len(rows), "written twice"
    return values


def read_tensorboard(folder: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "events"), size_guidance={"scalars": 0}).Reload()
    names = cast("list[str]", accumulator.Tags()["scalars"])
    scalars = [(event.step, name, event.value) for name in names for event in accumulator.Scalars(name)]
    values = {(step, name): value for step, name, value in scalars}
    assert len(values) == len(scalars), "written twice"
    return values


# How to read back what a writer wrote, for those whose values can be.
READERS: dict[str, Callable[[Path], Values]] = {
    "CsvWriter": read_csv,
    "JsonlWriter": read_jsonl,
    "TensorBoardWriter": read_tensorboard,
}
SCREENS = {"ConsoleWriter"}
SERVICES = {"MlflowWriter", "WandbWriter"}  # take nothing back; what is theirs alone is in unit/events/writers


def shipped() -> list[type[Writer]]:
    kinds = [getattr(events, name) for name in events.__all__]
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Writer) and kind is not Writer]


WRITERS = shipped()
FILES = [kind for kind in WRITERS if kind.__name__ not in SCREENS | SERVICES]
every_writer = pytest.mark.parametrize("kind", WRITERS, ids=[kind.__name__ for kind in WRITERS])
every_file = pytest.mark.parametrize("kind", FILES, ids=[kind.__name__ for kind in FILES])


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@every_file
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    settle_every=st.integers(1, 7),
    evaluate_every=st.integers(1, 7),
    late_by=st.integers(0, 3),
    updates=st.integers(1, 20),
)
def test_every_value_at_every_update_arrives_whatever_the_periods(
    kind: type[Writer],
    tmp_path_factory: pytest.TempPathFactory,
    settle_every: int,
    evaluate_every: int,
    late_by: int,
    updates: int,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    storage, expected = Storage(), {}
    incidents: list[Incident] = []
    all_writers = Writers([kind()], incidents.append)
    with all_writers.opened(folder, 0):
        for update in range(1, updates + 1):
            storage.put("train/loss", 3.0 * update, 2, update=update)
            expected[update, "train/loss"] = 1.5 * update
            if update % evaluate_every == 0:
                storage.put("valid/loss", 0.25 * update, update=update)
                expected[update, "valid/loss"] = 0.25 * update
            if update > late_by:
                storage.put("late/loss", 0.5, update=update - late_by)
                expected[update - late_by, "late/loss"] = 0.5
            if update % settle_every == 0:
                all_writers.write(storage.settle())
        all_writers.write(storage.settle())
    assert READERS[kind.__name__](folder) == expected
    assert not incidents


@every_file
def test_a_killed_run_that_is_resumed_reads_as_if_it_had_not_been(kind: type[Writer], tmp_path: Path) -> None:
    killed = kind()
    killed.open(tmp_path, 0)
    killed.write([Record(update, "loss", float(update), 1.0) for update in range(1, 9)])
    killed.flush()  # and never closed
    if kind.__name__ == "TensorBoardWriter":
        time.sleep(1.1)  # TensorBoard orders files by the second in their names
    resumed = kind()
    resumed.open(tmp_path, 5)
    resumed.write([Record(update, "loss", float(update), 1.0) for update in range(6, 12)])
    resumed.close()
    assert READERS[kind.__name__](tmp_path) == {(update, "loss"): float(update) for update in range(1, 12)}
    killed.close()


@every_writer
def test_it_takes_any_order_of_calls_any_event_and_numbers_that_are_not_finite(
    kind: type[Writer], tmp_path: Path
) -> None:
    writer = kind()
    writer.flush()
    writer.close()
    writer.open(tmp_path, 0)
    writer.open(tmp_path, 0)
    writer.write([])
    config: Any = {"train": {"updates": 3, "ema": None}, "betas": [0.9, 0.95]}
    writer.event("train_begin", TrainEvent(update=0, updates=None, resumed=False, config=config))
    writer.event("incident", Incident(kind="overflow", update=1, message="", details={}))
    for value in (Text("once"), Image(torch.zeros(2, 2))):
        writer.event("shown", Shown(update=1, name="train/it", value=value))
    writer.flush()
    writer.write([Record(1, "train/loss", float("nan"), 1.0)])
    writer.write([Record(2, "valid/loss", float("inf"), 1.0)])
    writer.event("train_end", TrainEvent(update=2, outcome="done", reason="", error=None, metrics={"loss": 1.0}))
    writer.close()
    writer.close()
    writer.flush()
