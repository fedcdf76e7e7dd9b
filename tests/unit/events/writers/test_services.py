"""TensorBoard, Weights & Biases and MLflow without their servers: what an offline run holds."""

import io
import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from evenstep.errors import MissingExtraError
from evenstep.events import (
    Image,
    MlflowWriter,
    Record,
    Shown,
    TensorBoardWriter,
    Text,
    TrainEvent,
    WandbWriter,
    Writer,
)

PNG = b"\x89PNG"


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


def blocks(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes."""
    place = 7
    part = b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


def wandb_records(folder: Path, within_s: float = 20.0) -> dict[str, list[Any]]:
    """All that was logged, by kind, once wandb's own process has written it, perhaps after the run was finished."""
    from wandb.proto import wandb_internal_pb2

    until = monotonic() + within_s
    while True:
        found: dict[str, list[Any]] = {}
        for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
            for block in blocks(file.read_bytes()):
                record: Any = wandb_internal_pb2.Record()
                record.ParseFromString(block)
                found.setdefault(record.WhichOneof("record_type"), []).append(record)
        if "exit" in found or monotonic() > until:
            return found
        sleep(0.05)


@pytest.mark.slow  # it starts a service of its own
def test_an_offline_run_of_wandb_has_everything(tmp_path: Path) -> None:
    write(WandbWriter(project="digits", mode="offline"), tmp_path, "failed")
    found = wandb_records(tmp_path)
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
        for one in found["history"]
    ]
    rows = [{name: value for name, value in row.items() if name[0] != "_"} for row in rows]
    assert rows[0] == {"update": 1, "train/loss": 0.5, "train/lr": 0.1}
    assert rows[2] == {"update": 1, "late/loss": 3.0}
    (image,) = tmp_path.glob("wandb/offline-run-*/files/media/images/image_*.png")
    assert image.read_bytes().startswith(PNG)
    (text,) = tmp_path.glob("wandb/offline-run-*/files/media/html/**/text_*.html")
    assert "&lt;once&gt;" in text.read_text()
    assert "updates" in str(found["config"])
    assert "a test" in str(found["summary"])
    assert "exit_code: 1" in str(found["exit"])


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
