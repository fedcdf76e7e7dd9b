"""A run folder is read as far as it can be read, and what cannot is said."""

import json
import math
from pathlib import Path

import pytest

from evenstep.errors import ArgumentError
from evenstep.tools.report.run import read_run
from refused import refused


def write_lines(path: Path, *lines: object) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def write_manifest(folder: Path, update: int, **other: object) -> None:
    step = folder / "checkpoints" / f"step-{update:08d}"
    step.mkdir(parents=True)
    manifest = {
        "update": update,
        "created": "2026-01-02T03:04:05+00:00",
        "files": {"a": {"bytes": 5}, "b": {"bytes": 7}},
    }
    (step / "manifest.json").write_text(json.dumps(manifest | other))


def test_metrics_are_values_by_name_and_update(tmp_path: Path):
    write_lines(
        tmp_path / "metrics.jsonl",
        {"update": 1, "train/loss": 2.5, "train/lr": 1},
        {"update": 2, "train/loss": "nan", "train/grad_norm": "inf"},
        {"update": 2, "valid/loss": 2.25},
    )
    metrics = read_run(tmp_path).metrics
    assert metrics.keys() == {"train/loss", "train/lr", "train/grad_norm", "valid/loss"}
    assert metrics["train/loss"][1] == 2.5
    assert math.isnan(metrics["train/loss"][2])
    assert metrics["train/lr"] == {1: 1.0}
    assert metrics["train/grad_norm"] == {2: math.inf}
    assert metrics["valid/loss"] == {2: 2.25}


def test_a_late_value_takes_its_place_and_a_repeated_one_is_the_later(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", *({"update": update, "x": 10 * update} for update in (1, 2, 3)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "x": 21}\n{"update": 0, "x": 5}\n')
    assert list(read_run(tmp_path).metrics["x"].items()) == [(0, 5.0), (1, 10.0), (2, 21.0), (3, 30.0)]


def test_lines_that_are_cut_off_or_foreign_are_passed_over_and_said(tmp_path: Path):
    write_lines(
        tmp_path / "metrics.jsonl", {"update": 1, "x": 1}, "", "not json", [1], {"x": 2}, {"update": "3", "x": 3}
    )
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"update": 4, "x"')
    run = read_run(tmp_path)
    assert run.metrics == {"x": {1: 1.0}}
    assert "`metrics.jsonl` has lines that cannot be read, passed over: 5." in run.problems


def test_files_that_are_missing_are_said_but_those_that_need_not_be_there(tmp_path: Path):
    (tmp_path / "config.toml").write_text("seed = 1")
    run = read_run(tmp_path)
    assert run.problems == ["`status.json` is missing.", "`metrics.jsonl` is missing."]
    assert run.config == "seed = 1"


def test_files_that_cannot_be_read_are_said(tmp_path: Path):
    for name in ("config.toml", "metrics.jsonl", "latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "status.json").write_text("[]")
    assert read_run(tmp_path).problems == [
        "`config.toml` cannot be read: Is a directory.",
        "`status.json` is not a JSON object: what became of the run is not known.",
        "`metrics.jsonl` cannot be read: Is a directory.",
    ]


@pytest.mark.parametrize("place", [".", "absent", "file"])
def test_what_is_no_run_folder_is_refused(place: str, tmp_path: Path):
    (tmp_path / "file").touch()
    with refused(ArgumentError, "folder"):
        read_run(tmp_path / place)


def test_checkpoints_are_told_by_their_manifests(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    write_manifest(tmp_path, 20)
    write_manifest(tmp_path, 3)
    (tmp_path / "latest").write_text("step-00000020\n")
    (tmp_path / "checkpoints" / "step-00000030").mkdir()
    found = read_run(tmp_path).checkpoints
    assert [(line.name, line.update, line.num_bytes, line.is_latest) for line in found] == [
        ("step-00000003", 3, 12, False),
        ("step-00000020", 20, 12, True),
    ]


def test_a_manifest_that_is_none_is_said(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    write_manifest(tmp_path, 1, files=5)
    write_manifest(tmp_path, 2)
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("{")
    run = read_run(tmp_path)
    assert run.checkpoints == []
    assert run.problems[2:] == [
        "`checkpoints/step-00000001/manifest.json` lacks fields: the checkpoint is left out.",
        "`checkpoints/step-00000002/manifest.json` is not a JSON object: the checkpoint is left out.",
    ]


def test_incidents_are_read_where_there_are_any(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    write_lines(
        tmp_path / "incidents.jsonl",
        {"update": 7, "kind": "non_finite", "message": "the loss was nan", "details": {"microbatch": 3}},
        {"update": 8},
    )
    first, second = read_run(tmp_path).incidents
    assert (first.update, first.kind, first.message) == (7, "non_finite", "the loss was nan")
    assert first.details == '{"microbatch": 3}'
    assert (second.kind, second.message, second.details) == ("incident", "", "")


def test_values_are_read_from_the_table_where_there_are_no_lines(tmp_path: Path):
    (tmp_path / "status.json").write_text("{}")
    table = "update,name,value,weight\n1,train/loss,2.5,8.0\n2,train/loss,nan,8.0\n2,valid/loss,inf,1.0\n3,x\n"
    (tmp_path / "metrics.csv").write_text(table)
    run = read_run(tmp_path)
    assert run.metrics["train/loss"][1] == 2.5
    assert math.isnan(run.metrics["train/loss"][2])
    assert run.metrics["valid/loss"] == {2: math.inf}
    assert run.problems == ["Line 5 of `metrics.csv` cannot be read: passed over."]


def test_a_run_from_a_script_has_no_configuration_to_miss(tmp_path: Path):
    (tmp_path / "status.json").write_text("{}")
    write_lines(tmp_path / "metrics.jsonl", {"update": 1, "x": 1})
    assert read_run(tmp_path).problems == []
