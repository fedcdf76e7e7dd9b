"""`evenstep train` with `launch.slurm`: what is given to SLURM's own module."""

from pathlib import Path
from typing import Any

import pytest

from evenstep.config.schema_ranks import SlurmTable


def test_train_submits_once_and_its_tasks_do_not_submit_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenstep.cli import train

    given: list[Any] = []
    monkeypatch.setattr(train, "submit_run", lambda *arguments, **more: given.append((arguments, more)) or 0)
    root = Path(__file__).parents[3]
    file = str(root / "recipes/digits/run.toml")
    settings = ["--runs", str(tmp_path), "--launch.slurm.nodes", "2"]
    assert train.run(file, settings) == 0
    ((asked, arguments), more) = given[0]
    assert more["name"] == "digits"
    assert (asked.nodes, asked.ranks_per_node) == (2, 1)
    assert arguments == ["train", file, *settings, "--launch.slurm", "none", "--resume", "auto"]
    assert not list(tmp_path.iterdir())


def test_a_submitted_job_is_said_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evenstep.cli import starting

    given: list[Any] = []
    monkeypatch.setattr(starting, "submit", lambda job, *_, **__: given.append(job) or "12")
    assert starting.submit_run(SlurmTable(nodes=2, partition="big"), ["train"], name="run", folder=tmp_path) == 0
    assert (given[0].nodes, given[0].ranks_per_node, given[0].timeout_minutes, given[0].partition) == (2, 1, 60, "big")
    assert "12: 2 × 1 ranks" in capsys.readouterr().out
