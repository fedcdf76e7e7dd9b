"""The page holds what the run folder says, escaped, and needs nothing from outside."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.errors import EvenstepError
from evenstep.tools.report import write_report

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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "gpt <b>"
    step = folder / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (folder / "config.toml").write_text('name = "</script><script>alert(1)</script>"\n')
    (folder / "metrics.jsonl").write_text(
        '{"update": 1, "train/loss": 3.5, "</script><b>/x": 1}\n{"update": 2, "train/loss": "nan"}\n'
        '{"update": 2, "valid/loss": 2.25}\n'
    )
    status = {"state": "done", "update": 2, "updates": 2, "reason": "all `2` updates are done <b>"}
    times = {"started": "2026-01-01T00:00:00+00:00", "changed": "2026-01-01T00:03:12+00:00"}
    (folder / "status.json").write_text(json.dumps(status | times))
    (folder / "latest").write_text("step-00000002\n")
    (step / "manifest.json").write_text(
        '{"update": 2, "created": "2026-01-02T03:04:05+00:00", "files": {"model.safetensors": {"bytes": 1500000}}}'
    )
    (folder / "incidents.jsonl").write_text('{"update": 2, "kind": "non_finite", "message": "the loss was <nan>"}\n')
    return folder


def read(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_tells_what_the_run_folder_says(run: Path):
    text = read(run).text
    for expected in (
        "gpt <b>",
        "done all 2 updates are done <b>",
        "updates 2 of 2",
        "duration 3 min 12 s",
        "valid/loss 2.25 best, at update 2",
        "non_finite update 2 the loss was <nan>",
        "step-00000002 latest 1.5 MB 2026-01-02 03:04 UTC",
        'name = "</script><script>alert(1)</script>"',
        "train: 1 not finite, the first at update 2",
    ):
        assert expected in text
    assert "could be read" not in text


def test_nothing_of_the_run_becomes_markup_or_script(run: Path):
    page = read(run)
    assert len(page.scripts) == 4
    assert not any(tag in ("b", "i") and "gpt" in str(attrs) for tag, attrs in page.tags)
    assert sum(tag == "b" for tag, _ in page.tags) == 3  # the state, the incident, the checkpoint
    assert all("alert(1)" not in script for script in page.scripts)


def test_the_page_asks_nothing_of_a_network(run: Path):
    page = read(run)
    assert not any(name in attrs for _, attrs in page.tags for name in ("src", "srcset", "action"))
    assert all(attrs["href"].startswith("#") for _, attrs in page.tags if "href" in attrs)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert not re.search(r"@import|url\(", (run / "report.html").read_text())


def test_the_licence_of_the_charts_goes_with_them(run: Path):
    script = read(run).scripts[1]
    assert "Permission is hereby granted, free of charge" in script
    assert "Copyright (c) 2022 Leon Sorokin" in script


def test_what_cannot_be_read_is_said_on_the_page(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "train/loss": 3.5}\n{"upd')
    text = read(tmp_path).text
    assert "Not everything in the run folder could be read" in text
    assert "status.json cannot be read" in text
    assert "metrics.jsonl has a line that cannot be read" in text
    assert "unknown" in text
    assert "updates 1 train/loss 3.5" in text


def test_a_run_without_any_value_has_a_page(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.jsonl").touch()
    page = read(tmp_path)
    assert "No values were logged." in page.text
    assert "Checkpoints There are none." in page.text
    assert json.loads(page.scripts[0])["charts"] == []


def test_a_run_that_has_not_ended_tells_when_it_was_last_heard_of(tmp_path: Path):
    status = {"state": "running", "update": 5, "updates": None, "reason": None, "changed": "2026-01-01T00:03:12+00:00"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    text = read(tmp_path).text
    assert "running last heard of at 2026-01-01 00:03 UTC" in text
    assert "updates 5" in text


def test_only_the_last_hundred_incidents_are_listed(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    lines = [json.dumps({"update": update, "kind": "overflow", "message": f"no. {update}"}) for update in range(250)]
    (tmp_path / "incidents.jsonl").write_text("\n".join(lines))
    text = read(tmp_path).text
    assert "no. 249" in text
    assert "no. 150" in text
    assert "no. 149" not in text
    assert "The last 100 of 250" in text


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "report.html" / "inside").mkdir(parents=True)
    with pytest.raises(EvenstepError):
        write_report(tmp_path)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from([10**400, "0001-01-01T00:00:00"])
)
anything = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


def objects_with(*names: str) -> st.SearchStrategy[dict[str, object]]:
    """Objects in which the names that are read hold anything."""
    return st.dictionaries(st.sampled_from([*names, "train/loss", "\ud800/x"]), anything)


@settings(max_examples=40, deadline=None)
@given(
    status=objects_with("state", "reason", "update", "updates", "started", "changed"),
    manifest=objects_with("update", "created", "files"),
    lines=st.lists(objects_with("update", "kind", "message", "details"), max_size=5),
)
def test_whatever_the_files_hold_there_is_a_page(
    tmp_path_factory: pytest.TempPathFactory,
    status: dict[str, object],
    manifest: dict[str, object],
    lines: list[dict[str, object]],
):
    folder = tmp_path_factory.mktemp("run")
    step = folder / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps(status))
    (step / "manifest.json").write_text(json.dumps({"update": 1, "created": "", "files": {}} | manifest))
    for name in ("metrics.jsonl", "incidents.jsonl"):
        (folder / name).write_text("".join(json.dumps({"update": 1} | line) + "\n" for line in lines))
    assert folder.name in read(folder).text
