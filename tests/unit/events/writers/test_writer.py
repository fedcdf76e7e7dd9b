from pathlib import Path

import pytest

from evenstep.errors import ArgumentError
from evenstep.events import JsonlWriter
from evenstep.events.writers.writer import run_file


def test_the_run_folder_is_made_when_a_file_is_wanted(tmp_path: Path) -> None:
    path = run_file(JsonlWriter(), tmp_path / "a" / "b", "x.txt")
    assert path == tmp_path / "a" / "b" / "x.txt"
    assert path.parent.is_dir()


def test_a_run_without_a_folder_has_no_files() -> None:
    with pytest.raises(ArgumentError):
        run_file(JsonlWriter(), None, "x.txt")
