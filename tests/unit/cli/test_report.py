"""`evenstep report`: of one run, of several, and followed."""

import json
import signal
from pathlib import Path
from urllib.request import urlopen

import pytest
from scripts import Script

from evenstep.cli import main


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"update": 1, "train/loss": 2.5}\n')
        (folder / "config.toml").write_text(f'name = "{name}"\n[optimizer]\nlr = {lr}\n')
    return tmp_path / "runs"


def test_a_run_has_its_page_in_its_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs/a"]) == 0
    assert capsys.readouterr().out == "runs/a/report.html\n"


def test_several_runs_share_a_page_beside_their_folders(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "notes").mkdir()
    assert main(["report", "runs/a", "runs/b", "runs/notes"]) == 0
    assert capsys.readouterr().out == "no run, left out: runs/notes\nruns/report.html\n"
    text = (runs / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert "optimizer.lr" in text  # in which they differ
    assert main(["report", "runs/a", "runs/b", "runs/report.html", "--to", "both.html"]) == 0
    assert Path("both.html").exists()
    assert main(["report", "runs/a", "--to", "new/one.html"]) == 0
    assert Path("new/one.html").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["runs/a", "runs/none"], "runs/none"),
        (["runs", "."], "none of the 2 paths"),
        (["runs/none"], "runs/none"),
        (["runs/a", "--follow", "--to", "x.html"], "--to"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    runs: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *arguments]) != 0
    assert named in capsys.readouterr().err


def test_followed_runs_are_served_until_ctrl_c(runs: Path) -> None:
    script = Script("-m", "evenstep", "report", "runs/a", "runs/b", "--follow")
    script.wait_for(lambda: "\n" in script.said(), timeout_s=60)
    address = script.said().split()[0]
    assert address.startswith("http://127.0.0.1:")
    with urlopen(address, timeout=30) as answer:
        assert "2 runs" in answer.read().decode()
    script.send_signal(signal.SIGINT)
    end = script.ended(30)
    assert (end.code, end.err) == (0, "")
