"""Weights & Biases without its service: what the offline run holds."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from evenstep.errors import EvenstepError, MissingExtraError
from evenstep.events import Histogram, Image, Record, Shown, Text, TrainEvent, WandbWriter


def blocks(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes."""
    place, part = 7, b""
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


def records(folder: Path, within_s: float = 20.0) -> list[Any]:
    """All that was logged, once wandb's own process has written it, which it may do after the run was finished."""
    from wandb.proto import wandb_internal_pb2

    until = monotonic() + within_s
    while True:
        found: list[Any] = []
        for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
            for block in blocks(file.read_bytes()):
                found.append(wandb_internal_pb2.Record())
                found[-1].ParseFromString(block)
        if any(one.WhichOneof("record_type") == "exit" for one in found) or monotonic() > until:
            return found
        sleep(0.05)


def history(folder: Path) -> list[dict[str, Any]]:
    rows = [one.history.item for one in records(folder) if one.WhichOneof("record_type") == "history"]
    named = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]
    return [{name: value for name, value in row.items() if name[0] != "_"} for row in named]


def test_an_offline_run_has_every_value_at_its_update_and_all_that_is_shown(tmp_path: Path) -> None:
    writer = WandbWriter(project="digits", mode="offline")
    writer.open(tmp_path, 0)
    config: Any = {"train": {"updates": 3}}
    writer.event("train_begin", TrainEvent(update=0, updates=3, resumed=False, config=config))
    writer.write([Record(1, "train/loss", 0.5, 8.0), Record(1, "train/lr", 0.1, 1.0), Record(2, "train/loss", 0.25, 8)])
    writer.write([Record(1, "late/loss", 3.0, 1.0)])
    writer.event("shown", Shown(update=2, name="text", value=Text("<once>")))
    writer.event("shown", Shown(update=2, name="image", value=Image(torch.zeros(2, 2), "black")))
    writer.event("shown", Shown(update=2, name="counts", value=Histogram([0.0, 1.0, 1.0], bins=2)))
    end = TrainEvent(update=2, outcome="failed", reason="a test", error=None, metrics={"train/loss": 0.25})
    writer.event("train_end", end)
    writer.close()
    rows = history(tmp_path)
    assert rows[:3] == [
        {"update": 1, "train/loss": 0.5, "train/lr": 0.1},
        {"update": 2, "train/loss": 0.25},
        {"update": 1, "late/loss": 3.0},
    ]
    shown = {name: value for row in rows[3:] for name, value in row.items() if name != "update"}
    assert shown["counts/values"] == [1, 2]
    (image,) = tmp_path.glob("wandb/offline-run-*/files/media/images/image_*.png")
    assert image.read_bytes().startswith(b"\x89PNG")
    (text,) = tmp_path.glob("wandb/offline-run-*/files/media/html/text_*.html")
    assert "&lt;once&gt;" in text.read_text()
    by_kind: dict[str, str] = {}
    for one in records(tmp_path):
        by_kind[one.WhichOneof("record_type")] = by_kind.get(one.WhichOneof("record_type"), "") + str(one)
    assert "updates" in by_kind["config"]
    assert "a test" in by_kind["summary"]
    assert "exit_code: 1" in by_kind["exit"]


def test_a_resumed_run_goes_on_under_the_same_id(tmp_path: Path) -> None:
    ids: list[str] = []
    for update in (0, 1):
        writer = WandbWriter(mode="disabled")
        writer.open(tmp_path, update)
        ids.append((tmp_path / "wandb.id").read_text())
        writer.close()
    assert ids[0] == ids[1]
    assert len(ids[0]) == 8


def test_without_the_extra_it_is_refused_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError):
        WandbWriter()


def test_a_service_that_refuses_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(EvenstepError):
        WandbWriter().open(tmp_path, 0)
