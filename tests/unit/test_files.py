"""One replacement of files and folders: the old content or the new, never a part."""

from pathlib import Path

import pytest

from evenstep import files
from evenstep.files import replacing


def written(path: Path, text: str) -> None:
    with replacing(path) as new:
        new.write_text(text)


def filled(path: Path, text: str) -> None:
    with replacing(path) as new:
        (new / "inner").mkdir(parents=True)
        (new / "inner" / "file").write_text(text)


def test_files_are_made_and_replaced(tmp_path: Path) -> None:
    for text in ("one", "two"):
        written(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_old_folder_comes_back_if_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "folder", "old")
    rename = files.rename

    def failing(source: Path, target: Path) -> None:
        if source.name == ".saving-folder":
            raise OSError(5, "the disk has failed")
        rename(source, target)

    monkeypatch.setattr(files, "rename", failing)
    with pytest.raises(OSError, match="failed"):
        filled(tmp_path / "folder", "new")
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    filled(tmp_path / "folder", "old")
    (tmp_path / ".saving-folder").write_text("half")
    filled(tmp_path / ".replaced-folder", "older")
    filled(tmp_path / "folder", "new")
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_content_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(files, "sync_path", lambda path: seen.append((path.name, (tmp_path / "file").exists())))
    written(tmp_path / "file", "text")
    assert seen == [(".saving-file", False), (tmp_path.name, True)]
