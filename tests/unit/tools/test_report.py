"""The report: a page holds the content of run folders, escaped, needs nothing from outside, and can be followed."""

import json
import re
from collections.abc import Generator
from html import unescape
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.tools.report import write_report
from evenstep.tools.report.follow import server
from evenstep.tools.report.page import write_page


def text_of(page: str) -> str:
    """What a reader sees."""
    words = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", page, flags=re.S)
    return " ".join(unescape(words).split())


def write_lines(path: Path, *lines: object) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def read(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


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
        assert expected in text_of(page)
    scripts = re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.S)
    assert len(scripts) == 4 and all("alert(1)" not in script for script in scripts)
    assert "Permission is hereby granted, free of charge" in scripts[1]
    tags = "".join(re.findall(r"<[a-z][^>]*>", re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", page, flags=re.S)))
    assert not re.search(r"\b(src|srcset|action)=|href=\"(?!#)", tags) and not re.search(r"@import|url\(", page)
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in unescape(tags)


def test_runs_that_differ_in_their_seed_alone_have_a_spread(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, (lr, seed) in zip(folders, ((0.02, 1), (0.02, 2), (0.01, 1)), strict=True):
        folder.mkdir()
        (folder / "config.toml").write_text(f"seed = {seed}\n[optimizer]\nlr = {lr}\n")
        write_lines(folder / "metrics.jsonl", {"update": 1, "train/loss": 2.0 + seed})
    text = text_of(write_page(folders, tmp_path / "all.html").read_text())
    assert "optimizer.lr = 0.02" in text and " ± " in text
    assert "optimizer.lr = 0.01" not in text  # a single run has none


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
    assert folder.name in text_of(read(folder))


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "train/loss": 2.5}\n')
    (tmp_path / "secret.txt").write_text("not for others")
    return tmp_path


@pytest.fixture
def port(served: Path) -> Generator[int]:
    with server([served]) as serving:
        thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield int(serving.server_address[1])
        serving.shutdown()
        thread.join()


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_is_rebuilt_when_a_file_has_changed_and_its_state_says_so(served: Path, port: int) -> None:
    assert get(port, "/") == get(port, "/")
    assert "connect-src &#39;self&#39;" in get(port, "/")[1] or "connect-src 'self'" in get(port, "/")[1]
    before = get(port, "/state")
    assert get(port, "/state") == before
    with (served / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "train/loss": 1.25}\n')
    assert get(port, "/state") != before
    text = get(port, "/")[1]
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["charts"][0]["curves"][0]["values"] == [2.5, 1.25]
    assert data["live"] is True
    assert not (served / "report.html").exists()


@pytest.mark.parametrize("path", ["/secret.txt", "/../secret.txt", "/metrics.jsonl", "/state/"])
def test_nothing_else_is_served(port: int, path: str) -> None:
    assert get(port, path)[0] == 404


def test_a_page_of_somebody_else_s_whose_name_leads_here_gets_nothing(port: int) -> None:
    assert get(port, "/", host="evil.example")[0] == 403
    assert get(port, "/", host="localhost")[0] == 200
