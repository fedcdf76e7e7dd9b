"""MLflow with the store that `mlflow-skinny` has: files, here in the run folder."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.errors import EvenstepError, MissingExtraError
from evenstep.events import Histogram, Image, MlflowWriter, Record, Shown, Text, TrainEvent


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which the writer would set, and not take back


def client(folder: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(folder / "mlruns").as_uri())


def begin(writer: MlflowWriter, folder: Path, update: int, config: Any) -> None:
    writer.open(folder, update)
    writer.event("train_begin", TrainEvent(update=update, updates=3, resumed=update > 0, config=config))


def test_the_store_has_every_value_at_its_update_the_parameters_and_all_that_is_shown(tmp_path: Path) -> None:
    writer = MlflowWriter(experiment="digits", run_name="first")
    begin(writer, tmp_path, 0, {"train": {"updates": 3, "ema": None}})
    writer.write([Record(1, "train/loss", 0.5, 8.0), Record(2, "train/loss", math.inf, 8.0)])
    writer.write([Record(1, "late/loss", 3.0, 1.0)])
    writer.event("shown", Shown(update=2, name="valid/text", value=Text("once")))
    writer.event("shown", Shown(update=2, name="image", value=Image(torch.zeros(2, 2))))
    writer.event("shown", Shown(update=2, name="counts", value=Histogram([0.0, 1.0, 1.0], bins=2)))
    writer.event("train_end", TrainEvent(update=2, outcome="done", reason="all is done", error=None))
    writer.close()
    store, run_id = client(tmp_path), (tmp_path / "mlflow.id").read_text()
    run = store.get_run(run_id)
    assert [(one.step, one.value) for one in store.get_metric_history(run_id, "train/loss")] == [
        (1, 0.5),
        (2, math.inf),
    ]
    assert run.data.params == {"train.updates": "3"}
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert (run.data.tags["outcome"], run.data.tags["reason"]) == ("done", "all is done")
    shown = Path(run.info.artifact_uri.removeprefix("file://")) / "shown"
    assert (shown / "valid/text/00000002.txt").read_text() == "once"
    assert (shown / "image/00000002.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((shown / "counts/00000002.json").read_text())["counts"] == [1, 2]


def test_a_resumed_run_goes_on_in_the_same_and_says_what_has_changed(tmp_path: Path) -> None:
    for update, updates in ((0, 3), (3, 5)):
        writer = MlflowWriter()
        begin(writer, tmp_path, update, {"updates": updates, "seed": 1})
        writer.write([Record(update + 1, "loss", 0.5, 1.0)])
        writer.close()
    run_id = (tmp_path / "mlflow.id").read_text()
    run = client(tmp_path).get_run(run_id)
    assert run.data.params == {"updates": "3", "seed": "1"}
    assert run.data.tags["changed.updates"] == "5"
    assert [one.step for one in client(tmp_path).get_metric_history(run_id, "loss")] == [1, 4]
    assert run.info.status == "KILLED"  # stopped: nobody said that it was done


def test_without_the_extra_it_is_refused_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError):
        MlflowWriter()


def test_a_store_that_is_not_there_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(EvenstepError):
        MlflowWriter(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db").open(tmp_path, 0)
