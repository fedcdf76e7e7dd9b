import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ArgumentError, EvenstepError
from evenstep.events import Incident, JsonlWriter, Record
from refused import refused


def written(folder: Path, *batches: list[Record], update: int = 0) -> str:
    writer = JsonlWriter()
    writer.open(folder, update)
    for records in batches:
        writer.write(records)
    writer.close()
    return (folder / "metrics.jsonl").read_text(encoding="utf-8")


def test_the_values_of_an_update_share_a_line(tmp_path: Path) -> None:
    records = [Record(1, "train/loss", 0.1, 8.0), Record(1, "train/lr", 1e-5, 1.0), Record(2, "train/loss", -3.0, 8.0)]
    expected = '{"update": 1, "train/loss": 0.1, "train/lr": 1e-05}\n{"update": 2, "train/loss": -3.0}\n'
    assert written(tmp_path, records) == expected


@given(name=st.text(min_size=1), value=st.floats())
def test_every_line_is_strict_json_and_gives_the_same_number_back(
    name: str, value: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = written(tmp_path_factory.mktemp("run"), [Record(3, name, value, 1.0)])

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    read = json.loads(text, parse_constant=refuse)
    if name != "update":
        assert read["update"] == 3
        assert float(read[name]) == value or math.isnan(value)
        assert isinstance(read[name], float) == math.isfinite(value)


def test_a_resumed_run_drops_what_will_happen_again_and_a_half_written_line(tmp_path: Path) -> None:
    written(tmp_path, [Record(update, "a", float(update), 1.0) for update in range(1, 6)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 6, "a"')
    text = written(tmp_path, [Record(4, "a", 40.0, 1.0)], update=3)
    assert [json.loads(line)["a"] for line in text.splitlines()] == [1.0, 2.0, 3.0, 40.0]


@pytest.mark.parametrize("line", ["not json\n", "[1]\n", '{"a": 1}\n', "\x00\x00\n", "3\n"])
def test_a_file_of_something_else_is_an_error_and_is_not_touched(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 9}\n' + line)
    with pytest.raises(EvenstepError):
        JsonlWriter().open(tmp_path, 0)
    assert path.read_text() == '{"update": 9}\n' + line


def test_what_is_no_file_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    for make in (os.mkfifo, os.mkdir):
        place = tmp_path / make.__name__ / "metrics.jsonl"
        place.parent.mkdir()
        make(place)
        with pytest.raises(EvenstepError):
            JsonlWriter().open(place.parent, 0)


def test_incidents_are_appended_to_a_file_of_their_own(tmp_path: Path) -> None:
    writer = JsonlWriter()
    writer.open(tmp_path, 0)
    assert not (tmp_path / "incidents.jsonl").exists()
    for update in (3, 5):
        writer.event("incident", Incident(kind="overflow", update=update, message="halved", details={"scale": 2.0}))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert lines[1] == {"update": 5, "kind": "overflow", "message": "halved", "details": {"scale": 2.0}}
    assert len(lines) == 2


def test_a_run_without_a_folder_has_no_files() -> None:
    with refused(ArgumentError, "folder"):
        JsonlWriter().open(None, 0)
