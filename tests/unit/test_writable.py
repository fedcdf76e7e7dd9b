"""Where a result is to go is looked at before the work that makes it, by whoever writes one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenstep.checkpoint import average_checkpoints, export_weights, write_checkpoint
from evenstep.errors import ArgumentError
from evenstep.writable import why_not_written


def test_what_is_known_to_speak_against_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "folder").mkdir()
    assert why_not_written(Path("new/place/a.json")) == ""
    assert why_not_written(Path("file")) == ""
    assert why_not_written(Path("folder")) == "it is a folder"
    assert why_not_written(Path("folder"), folder=True) == ""
    assert why_not_written(Path("file"), folder=True) == f"`{tmp_path / 'file'}` is no folder"
    assert why_not_written(Path("file/new/a.json")) == f"`{tmp_path / 'file'}` is no folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_what_may_not_be_written_is_said_by_the_nearest_thing_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("here")
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(os, "access", lambda path, how: asked.append((path, how)) is not None)
    assert why_not_written(tmp_path / "file") == f"nothing may be written to `{tmp_path / 'file'}`"
    assert why_not_written(tmp_path / "new" / "a.json") == f"nothing may be written to `{tmp_path}`"
    assert asked == [(tmp_path / "file", os.W_OK), (tmp_path, os.W_OK | os.X_OK)]


def export(of: Path, to: Path) -> None:
    export_weights(of, to / "model.safetensors")


def average(of: Path, to: Path) -> None:
    average_checkpoints([of / "checkpoints" / f"step-0000000{number}" for number in (1, 2)], to)


@pytest.mark.parametrize("write", [export, average])
def test_a_place_that_can_not_be_is_refused_before_anything_is_read(
    write: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        write_checkpoint(tmp_path / "run" / "checkpoints", number, {"model": {"weight": torch.ones(2) * number}})
    (tmp_path / "file").write_text("here")

    def never(*_: object) -> None:
        raise AssertionError("it was read")

    with monkeypatch.context() as blind:
        blind.setattr("evenstep.checkpoint.reader.CheckpointReader.load", never)
        with pytest.raises(ArgumentError, match=r"can't be written: `.*/file` is no folder; give another place\."):
            write(tmp_path / "run", tmp_path / "file" / "out")
    write(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out").is_dir()
