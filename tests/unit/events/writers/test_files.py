import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from evenstep.errors import MissingExtraError
from evenstep.events import (
    CsvWriter,
    Image,
    Incident,
    JsonlWriter,
    MlflowWriter,
    Record,
    Shown,
    TensorBoardWriter,
    Text,
    TrainEvent,
    WandbWriter,
    Writer,
)


def written(kind: type[Writer], folder: Path, *batches: list[Record], update: int = 0) -> str:
    writer = kind()
    writer.open(folder, update)
    for records in batches:
        writer.write(records)
    writer.close()
    (path,) = folder.glob("metrics.*")
    return path.read_text(encoding="utf-8")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@settings(max_examples=20)
@given(name=st.text(min_size=1).filter(lambda name: name.isprintable() and name != "update"), value=st.floats())
def test_every_line_gives_the_same_number_back(
    name: str, value: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    text = written(JsonlWriter, tmp_path_factory.mktemp("run"), [Record(3, name, value, 1.0)])
    read = json.loads(text, parse_constant=refuse)
    assert isinstance(read[name], float) == math.isfinite(value)
    text = written(CsvWriter, tmp_path_factory.mktemp("run"), [Record(3, name, value, 0.5)])
    (row,) = csv.DictReader(text.splitlines())
    assert (row["name"], row["weight"]) == (name, "0.5")
    for number, update in ((read[name], read["update"]), (row["value"], row["update"])):
        assert int(update) == 3
        assert float(number) == value or math.isnan(value)


def test_a_resumed_run_drops_what_happens_again_and_half_written_lines(tmp_path: Path) -> None:
    written(JsonlWriter, tmp_path, [Record(update, "a", float(update), 1.0) for update in range(1, 6)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 6, "a"')
    text = written(JsonlWriter, tmp_path, [Record(4, "a", 40.0, 1.0)], update=3)
    assert [json.loads(line)["a"] for line in text.splitlines()] == [1.0, 2.0, 3.0, 40.0]
    other = tmp_path / "csv"
    other.mkdir()
    (other / "metrics.csv").write_text("update,na")
    assert written(CsvWriter, other) == "update,name,value,weight\n"


def test_incidents_have_a_file(tmp_path: Path) -> None:
    writer = JsonlWriter()
    writer.open(tmp_path, 0)
    for update in (3, 5):
        writer.event("incident", Incident(kind="overflow", update=update, message="halved", details={"scale": 2.0}))
    writer.close()
    found = lines(tmp_path / "incidents.jsonl")
    assert found[1] == {"update": 5, "kind": "overflow", "message": "halved", "details": {"scale": 2.0}}
    assert len(found) == 2


def test_texts_and_images_have_a_file(tmp_path: Path) -> None:
    image = Image(torch.tensor([[0.0, 0.2], [0.4, 1.0]]), "grey")
    values = {"text": Text("a\nb"), "valid/image": image}
    for begins, updates in ((0, (1, 2)), (1, (2, 3))):  # update 2 happens again
        writer = JsonlWriter()
        writer.open(tmp_path, begins)
        for update in updates:
            for name, value in values.items():
                writer.event("shown", Shown(update=update, name=name, value=value))
        writer.close()
    found = lines(tmp_path / "shown.jsonl")
    assert [(line["update"], line["name"]) for line in found] == [(n, name) for n in (1, 2, 3) for name in values]
    file = "shown/valid/image/00000003.png"
    assert found[-2:] == [
        {"update": 3, "name": "text", "kind": "text", "text": "a\nb"},
        {"update": 3, "name": "valid/image", "kind": "image", "file": file, "caption": "grey"},
    ]
    assert np.asarray(Pillow.open(tmp_path / file)).tolist() == [[0, 51], [102, 255]]


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which the writer would set, and not take back


def begin(writer: Writer, folder: Path, update: int, config: Any) -> None:
    writer.open(folder, update)
    writer.event("train_begin", TrainEvent(update=update, updates=3, resumed=update > 0, config=config))


def write(writer: Writer, folder: Path, outcome: Any) -> None:
    """A run of two updates with all that a service takes."""
    begin(writer, folder, 0, {"train": {"updates": 3, "ema": None}})
    writer.write(
        [Record(1, "train/loss", 0.5, 8.0), Record(1, "train/lr", 0.1, 1.0), Record(2, "train/loss", math.inf, 8)]
    )
    writer.write([Record(1, "late/loss", 3.0, 1.0)])
    writer.event("shown", Shown(update=2, name="valid/text", value=Text("<once>")))
    writer.event("shown", Shown(update=2, name="image", value=Image(torch.tensor([[0.0, 0.2], [0.4, 1.0]]), "grey")))
    end = TrainEvent(update=2, outcome=outcome, reason="a test", error=None, metrics={"train/loss": 0.25})
    writer.event("train_end", end)
    writer.close()


def test_tensorboard_has_everything(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(TensorBoardWriter(), tmp_path, "done")
    read = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(one.step, one.value) for one in read.Scalars("train/loss")] == [(1, 0.5), (2, math.inf)]
    image = read.Images("image")[0]
    assert np.asarray(Pillow.open(io.BytesIO(image.encoded_image_string)))[..., 0].tolist() == [[0, 51], [102, 255]]
    assert read.Tensors("valid/text/text_summary")[0].tensor_proto.string_val[0] == b"<once>"
    assert b'"updates": 3' in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def mlflow_client(folder: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(folder / "mlruns").as_uri())


def test_the_store_of_mlflow_has_everything(tmp_path: Path) -> None:
    write(MlflowWriter(experiment="digits", run_name="first"), tmp_path, "done")
    store = mlflow_client(tmp_path)
    run_id = (tmp_path / "mlflow.id").read_text()
    run = store.get_run(run_id)
    losses = [(one.step, one.value) for one in store.get_metric_history(run_id, "train/loss")]
    assert losses == [(1, 0.5), (2, math.inf)]
    assert run.data.params == {"train.updates": "3"}
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert (run.data.tags["outcome"], run.data.tags["reason"]) == ("done", "a test")


def test_a_resumed_run_of_mlflow_goes_on(tmp_path: Path) -> None:
    for update, updates in ((0, 3), (3, 5)):
        writer = MlflowWriter()
        begin(writer, tmp_path, update, {"updates": updates, "seed": 1})
        writer.write([Record(update + 1, "loss", 0.5, 1.0)])
        writer.close()
    run_id = (tmp_path / "mlflow.id").read_text()
    run = mlflow_client(tmp_path).get_run(run_id)
    assert run.data.params == {"updates": "3", "seed": "1"}
    assert [one.step for one in mlflow_client(tmp_path).get_metric_history(run_id, "loss")] == [1, 4]
    assert run.info.status == "KILLED"  # it never said that it was done


@pytest.mark.parametrize(("library", "kind"), [("wandb", WandbWriter), ("mlflow", MlflowWriter)])
def test_a_missing_extra_is_refused_when_the_writer_is_built(
    monkeypatch: pytest.MonkeyPatch, library: str, kind: type[Writer]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError):
        kind()
