"""A run folder is read as far as it can be read, and what cannot is said."""

import json
import math
from pathlib import Path

import pytest

from evenstep.errors import ArgumentError
from evenstep.tools.report.run import KEPT, between, from_defaults, read_run
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
    assert sum("`metrics.jsonl`" in problem for problem in run.problems) == 5


def test_files_that_are_missing_are_said_but_those_that_need_not_be_there(tmp_path: Path):
    (tmp_path / "config.toml").write_text("seed = 1")
    run = read_run(tmp_path)
    assert {problem.split()[0] for problem in run.problems} == {"`status.json`", "`metrics.jsonl`"}
    assert run.config == "seed = 1"


def test_files_that_cannot_be_read_are_said(tmp_path: Path):
    for name in ("config.toml", "metrics.jsonl", "latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "status.json").write_text("[]")
    problems = read_run(tmp_path).problems
    assert [problem.split()[0] for problem in problems] == [
        "`config.toml`",
        "`status.json`",
        "`metrics.jsonl`",
        "`latest`",
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
    assert [problem.split("/")[1] for problem in run.problems[-2:]] == ["step-00000001", "step-00000002"]


def test_incidents_are_read_where_there_are_any(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    write_lines(
        tmp_path / "incidents.jsonl",
        {"update": 7, "kind": "non_finite", "message": "the loss was nan", "details": {"microbatch": 3}},
        {"update": 8},
    )
    first, second = read_run(tmp_path).incidents
    assert (first.update, first.kind, first.message) == (7, "non_finite", "the loss was nan")
    assert first.facts == '{"microbatch": 3}'
    assert (second.kind, second.message, second.facts) == ("incident", "", "")


def test_values_are_read_from_the_table_where_there_are_no_lines(tmp_path: Path):
    (tmp_path / "status.json").write_text("{}")
    table = "update,name,value,weight\n1,train/loss,2.5,8.0\n2,train/loss,nan,8.0\n2,valid/loss,inf,1.0\n3,x\n"
    (tmp_path / "metrics.csv").write_text(table)
    run = read_run(tmp_path)
    assert run.metrics["train/loss"][1] == 2.5
    assert math.isnan(run.metrics["train/loss"][2])
    assert run.metrics["valid/loss"] == {2: math.inf}
    assert ["`metrics.csv`" in problem for problem in run.problems] == [True]


def test_a_run_from_a_script_has_no_configuration_to_miss(tmp_path: Path):
    (tmp_path / "status.json").write_text("{}")
    write_lines(tmp_path / "metrics.jsonl", {"update": 1, "x": 1})
    assert read_run(tmp_path).problems == []


PNG = b"\x89PNG\r\n\x1a\nrest"


def read_shown(folder: Path, *lines: object) -> tuple[list[tuple[int, str, str]], list[str]]:
    write_lines(folder / "metrics.jsonl")
    (folder / "status.json").write_text("{}")
    write_lines(folder / "shown.jsonl", *lines)
    run = read_run(folder)
    return [(one.update, one.name, one.kind) for one in run.shown], run.problems


def test_texts_images_and_histograms_are_read_by_name_and_update(tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "a.png").write_bytes(PNG)
    found, problems = read_shown(
        tmp_path,
        {"update": 2, "name": "b", "kind": "text", "text": "once"},
        {"update": 1, "name": "b", "kind": "text", "text": "upon"},
        {"update": 1, "name": "a", "kind": "image", "file": "shown/a.png", "caption": "a digit"},
        {"update": 1, "name": "c", "kind": "histogram", "edges": [0, 0.5, 1], "counts": [3, 5], "num_not_finite": 0},
    )
    assert found == [(1, "a", "image"), (1, "b", "text"), (2, "b", "text"), (1, "c", "histogram")]
    assert problems == []
    assert read_run(tmp_path).shown[0].image.startswith("data:image/png;base64,")


def test_of_each_name_only_the_newest_are_kept(tmp_path: Path) -> None:
    lines = [{"update": update, "name": "a", "kind": "text", "text": ""} for update in range(20)]
    found, _ = read_shown(tmp_path, *lines)
    assert [update for update, _, _ in found] == list(range(20 - KEPT, 20))


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "image", "file": "../secret.png"},
        {"kind": "image", "file": "not-there.png"},
        {"kind": "image", "file": "text.png"},
        {"kind": "video"},
        {"kind": "histogram", "edges": [0.0, 1.0], "counts": [1, 2]},
        {"kind": "histogram", "edges": [0.0, "x"], "counts": [1]},
        {"kind": "histogram", "edges": [0.0, 1.0], "counts": [-1]},
    ],
)
def test_broken_samples_are_left_out_and_reported(tmp_path: Path, line: dict[str, object]) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "text.png").write_text("no image")
    found, problems = read_shown(folder, {"update": 7, "name": "valid/x", **line})
    assert (found, len(problems)) == ([], 1)


def test_settings_beside_their_defaults_leave_out_where_the_run_is() -> None:
    config = 'name = "a"\nruns = "there"\nseed = 1\nhooks = []\n[log]\nevery_updates = 10\nwriters = ["csv"]'
    defaults = 'runs = "runs"\nseed = 42\n[log]\nevery_updates = 10\nwriters = ["console", "jsonl"]'
    assert from_defaults(config, defaults) == [
        ("seed", ("1", "42")),
        ("log.writers", ('["csv"]', '["console", "jsonl"]')),
    ]
    assert from_defaults("seed = 1", "") is from_defaults("seed = ", "seed = 1") is None


def test_settings_in_which_runs_differ() -> None:
    assert between(["seed = 1\n[a]\nb = 2", "seed = 1", "not toml ="]) == [
        ("seed", ("1", "1", "")),
        ("a.b", ("2", "", "")),
    ]
    assert between(["seed = 1", "seed = 1"]) == []
