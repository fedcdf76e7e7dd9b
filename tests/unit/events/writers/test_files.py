import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from evenstep.events import CsvWriter, Image, Incident, JsonlWriter, Record, Shown, Text, Writer


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
