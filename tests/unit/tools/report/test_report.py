"""The page holds the content of run folders, escaped, and needs nothing from outside."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import evenstep
from evenstep.tools.report import write_report
from evenstep.tools.report.charts import charts, direction, figures_of
from evenstep.tools.report.page import write_page
from evenstep.tools.report.read import read_run

VOID = {"meta", "input", "link", "img", "br"}


class Page(HTMLParser):
    """A page as its tags, its visible text and its scripts; badly nested tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def write_lines(path: Path, *lines: object) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def read(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "gpt <b>"
    folder.mkdir()
    (folder / "config.toml").write_text('seed = 1\nnote = "</script><script>alert(1)</script>"\n')
    write_lines(
        folder / "metrics.jsonl",
        {"update": 1, "train/loss": 3.5, "</script><b>/x": 1},
        {"update": 2, "train/loss": "nan"},
        {"update": 2, "valid/loss": 2.25},
    )
    times = {"started": "2026-01-01T00:00:00+00:00", "changed": "2026-01-01T00:03:12+00:00"}
    status = {"state": "done", "update": 2, "updates": 2, "reason": "all `2` updates are done <b>", **times}
    (folder / "status.json").write_text(json.dumps(status))
    write_lines(folder / "incidents.jsonl", {"update": 2, "kind": "non_finite", "message": "the loss was <nan>"})
    return folder


def test_page_shows_the_run_folder_escaped_and_loads_nothing(run: Path) -> None:
    page = read(run)
    for expected in (
        "gpt <b>",
        "done all 2 updates are done <b>",
        "updates 2 of 2",
        "duration 3 min 12 s",
        "valid/loss 2.25 best, at update 2",
        "non_finite update 2 the loss was <nan>",
        "seed 1",
        'note = "</script><script>alert(1)</script>"',
        "train: 1 not finite, the first at update 2",
    ):
        assert expected in page.text
    assert "could be read" not in page.text
    assert len(page.scripts) == 4
    assert all("alert(1)" not in script for script in page.scripts)
    assert "Permission is hereby granted, free of charge" in page.scripts[1]
    assert not any(name in attrs for _, attrs in page.tags for name in ("src", "srcset", "action"))
    assert all(attrs["href"].startswith("#") for _, attrs in page.tags if attrs.get("href"))
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert not re.search(r"@import|url\(", (run / "report.html").read_text())


def test_broken_and_missing_files_are_listed_and_the_rest_is_shown(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", {"update": 1, "x": 1}, "", "not json", [1], {"x": 2}, {"update": "3"})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"update": 4, "x"')
    (tmp_path / "settings.json").write_text("[")
    found = read_run(tmp_path)
    assert found.metrics == {"x": {1: 1.0}}
    assert [problem.split()[0] for problem in found.problems] == [
        *("`settings.json`", "`status.json`", *["`metrics.jsonl`"] * 5),
    ]
    assert "Not everything in the run folder could be read" in read(tmp_path).text


class Line(evenstep.Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def train_line(folder: Path, *, lr: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(1, 1)
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    evenstep.Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data=evenstep.MapData(pairs, global_batch_size=4),
        lr_schedule="cosine",
        updates=3,
        seed=seed,
        device="cpu",
        folder=folder,
        checkpoint=evenstep.Checkpointing(config={"note": {"author": "me"}}),
        log=evenstep.Logging(writers=("jsonl",)),
    ).train()


def test_runs_of_a_script_are_compared_by_recorded_settings_and_over_seeds(tmp_path: Path) -> None:
    runs = [(0.02, 1), (0.02, 2), (0.01, 1)]
    folders = [tmp_path / f"lr{lr}-seed{seed}" for lr, seed in runs]
    for folder, (lr, seed) in zip(folders, runs, strict=True):
        train_line(folder, lr=lr, seed=seed)
    kept = read_run(folders[0]).settings
    expected = {
        "model.kind": "Linear",
        "model.parameters": "2",
        "task": "Line",
        "optimizer.kind": "SGD",
        "optimizer.lr": "0.02",
        "lr_schedule.kind": "Cosine",
        "data.global_batch_size": "4",
        "seed": "1",
        "precision": "32-true",
        "strategy": "Single",
        "updates": "3",
        "config.note.author": "me",
    }
    assert expected.items() <= kept.items()
    text = Page(write_page(folders, tmp_path / "all.html").read_text()).text
    assert "best train/loss incidents optimizer.lr seed" in text
    assert "optimizer.lr = 0.02" in text and "lr0.02-seed1, lr0.02-seed2" in text and " ± " in text
    assert "optimizer.lr = 0.01" not in text  # a single run has no spread


def test_charts_group_metrics_of_one_quantity_and_order_them() -> None:
    names = ["perf/update_s", "train/lr", "train/grad_norm/blocks.0", "train/grad_norm", "valid/loss", "train/loss"]
    found = charts([("a", {name: {1: 1.0} for name in names})])
    assert [(chart["group"], chart["title"], [curve["label"] for curve in chart["curves"]]) for chart in found] == [
        ("", "loss", ["train", "valid"]),
        ("", "grad_norm", ["train"]),
        ("", "lr", ["train"]),
        ("grad_norm", "grad_norm/blocks.0", ["train"]),
        ("perf", "perf/update_s", ["update_s"]),
    ]


def test_best_values_follow_the_direction_of_the_name() -> None:
    metrics = {
        "perf/update_s": {1: 1.0},
        "train/loss": {1: math.nan, 2: 5.0, 3: 5.0, 4: math.nan},
        "valid/accuracy": {1: 0.5, 2: 0.9, 3: 0.7},
        "valid/loss": {1: 3.0, 2: 1.0, 3: 2.0},
    }
    found = figures_of(metrics)
    assert [(name, one.best, one.best_update) for name, one in found.items()] == [
        ("valid/loss", 1.0, 2),
        ("valid/accuracy", 0.9, 2),
        ("train/loss", 5.0, 2),
        ("perf/update_s", None, 0),
    ]
    names = {"valid/bits_per_byte": 1, "test/rmse": 1, "valid/f1": -1, "train/lr": 0, "perf/loss_s": 0}
    assert {name: direction(name) for name in names} == names


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from([10**400, "0001-01-01T00:00:00"])
)
anything = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


def objects_with(*names: str) -> st.SearchStrategy[dict[str, object]]:
    """Objects in which the names that are read hold anything."""
    return st.dictionaries(st.sampled_from([*names, "train/loss", "\ud800/x"]), anything)


@settings(max_examples=30, deadline=None)
@given(
    status=objects_with("state", "reason", "update", "updates", "started", "changed"),
    recorded=anything,
    lines=st.lists(objects_with("update", "kind", "message", "details"), max_size=5),
)
def test_any_content_of_the_files_gives_a_page(
    tmp_path_factory: pytest.TempPathFactory,
    status: dict[str, object],
    recorded: object,
    lines: list[dict[str, object]],
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "settings.json").write_text(json.dumps(recorded))
    for name in ("metrics.jsonl", "incidents.jsonl"):
        write_lines(folder / name, *({"update": 1} | line for line in lines))
    assert folder.name in read(folder).text
