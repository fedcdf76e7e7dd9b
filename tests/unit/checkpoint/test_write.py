"""A checkpoint is complete or not there, whatever fails, also the power, and says what failed."""

import errno
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from evenstep import files
from evenstep.checkpoint import (
    clean_leftovers,
    complete_checkpoints,
    read_checkpoint,
    retain,
    tensor_file,
    verify,
    write_checkpoint,
    write_emergency,
)
from evenstep.errors import CheckpointError
from newest import newest_checkpoint

State = Callable[[int], dict[str, object]]


def update_of(folder: Path) -> int | None:
    """The update of the newest readable checkpoint; its values must all be of that update."""
    checkpoint, rejected = newest_checkpoint(folder)
    assert rejected == []
    if checkpoint is None:
        return None
    model = checkpoint.state["model"]
    assert isinstance(model, dict)
    assert all(bool((tensor == checkpoint.update).all()) for tensor in model.values())
    return checkpoint.update


@pytest.mark.parametrize(("replaced", "for_good"), [(False, False), (True, True)], ids=["one fault", "disk gone"])
def test_a_fault_at_any_operation_leaves_a_readable_checkpoint_and_no_partial_one(
    replaced: bool, for_good: bool, folder: Path, state: State, failing_disk
):
    write_checkpoint(folder, 1, state(1))
    update = 1 if replaced else 2
    counted = failing_disk()
    with counted:
        write_checkpoint(folder, update, state(update))
    assert {"make_folder", "write", "save", "sync_path", "rename"} <= set(counted.operations)
    for number in range(len(counted.operations)):
        code = (errno.ENOSPC, errno.EIO)[number % 2]
        run = folder.parent.parent / str(number) / "checkpoints"
        write_checkpoint(run, 1, state(1))
        disk = failing_disk(number, code, for_good=for_good)
        with disk, pytest.raises(CheckpointError):
            write_checkpoint(run, update, state(update))
        assert update_of(run) in (1, update)
        assert all(verify(path).update in (1, update) for path in complete_checkpoints(run))
        if not for_good:
            assert not [path.name for path in run.iterdir() if path.name.startswith(".saving-")]
        # and the next save, on a disk that works, is not hindered
        clean_leftovers(run)
        write_checkpoint(run, 3, state(3))
        assert update_of(run) == 3
        assert all(path.name.startswith("step-") for path in run.iterdir())


def test_an_emergency_save_is_an_ordinary_checkpoint_that_is_made_once(folder: Path, state: State) -> None:
    assert write_emergency(folder, 4, state(4)) == folder / "step-00000004"
    assert read_checkpoint(folder).update == 4
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]
    assert write_emergency(folder, 4, state(5)) is None
    (folder / ".emergency-step-00000005").mkdir()
    assert write_emergency(folder, 5, state(5)) is None
    assert len(clean_leftovers(folder)) == 1
    assert write_emergency(folder, 5, state(5)) is not None


Choice = Callable[[Sequence[Any]], Any]
REAL_SAVE = tensor_file.save


class File:
    def __init__(self) -> None:
        self.may_be = [b""]

    def survives(self, choose: "Choice", path: Path) -> None:
        path.write_bytes(choose(self.may_be))


class Folder:
    def __init__(self) -> None:
        self.may_be: list[dict[str, File | Folder]] = [{}]

    @property
    def now(self) -> "dict[str, File | Folder]":
        return self.may_be[-1]

    def put(self, name: str, node: "File | Folder") -> None:
        self.may_be.append({**self.now, name: node})

    def take(self, name: str) -> "File | Folder":
        self.may_be.append({other: node for other, node in self.now.items() if other != name})
        return self.may_be[-2][name]

    def survives(self, choose: "Choice", path: Path) -> None:
        path.mkdir()
        for name, node in choose(self.may_be).items():
            node.survives(choose, path / name)

    def find(self, path: Path) -> Any:
        node: Any = self
        for name in path.parts:
            node = node.now[name]
        return node


class Modelled:
    """The local disk, followed by a model of what is left when power is lost; `after` is called after each operation.

    Of a file, what was synced last is certain; of a folder, the names it had when it was synced last. Each by itself is
    left as it was then, or as it was at any time since; a rename is there or not.
    """

    def __init__(self, root: Path, after: Callable[[], None]) -> None:
        self._root, self._after = root, after
        self.model = Folder()

    def _inner(self, path: Path) -> Path:
        return path.relative_to(self._root)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        at = self.model
        for name in self._inner(path).parts:
            if name not in at.now:
                at.put(name, Folder())
            if name != path.name:
                del at.may_be[:-1]  # parents are durable; see `files.make_folder`
            at = at.find(Path(name))
        self._after()

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        self._written(path)

    def save(self, path: Path, values: Mapping[str, Tensor]) -> None:
        REAL_SAVE(path, values)
        self._written(path)

    def _written(self, path: Path) -> None:
        """The file is new; any part of it may be on the disk."""
        data = path.read_bytes()
        file = File()
        file.may_be += [data[: len(data) // 2], data]
        self.model.find(self._inner(path.parent)).put(path.name, file)
        self._after()

    def sync_path(self, path: Path) -> None:
        del self.model.find(self._inner(path)).may_be[:-1]
        self._after()

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)
        assert source.parent == target.parent
        folder = self.model.find(self._inner(source.parent))
        folder.put(target.name, folder.take(source.name))
        del folder.may_be[-2]  # it has either name at each instant
        self._after()

    def remove_file(self, path: Path) -> None:
        path.rmdir() if path.is_dir() else path.unlink()
        self.model.find(self._inner(path.parent)).take(path.name)
        self._after()

    remove_folder = remove_file


def test_what_was_acknowledged_survives_a_loss_of_power_at_any_operation(
    tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    chance = random.Random(0)
    acknowledged, crashes = 0, 0
    seen: set[int] = set()

    def crash() -> None:
        nonlocal crashes
        choices: list[Choice] = [lambda one: one[0], lambda one: one[-1], chance.choice]
        for choose in choices:
            crashes += 1
            left = tmp_path / str(crashes)
            disk.model.survives(choose, left)
            found, rejected = newest_checkpoint(left / "run")
            assert not rejected
            update = 0 if found is None else found.update
            assert update >= acknowledged, f"update {acknowledged} was acknowledged, but {update} is there"
            assert found is None or str(found.state["model"]) == str(state(update)["model"])
            seen.add(update)
            shutil.rmtree(left)

    disk = Modelled(tmp_path / "real", crash)
    for name in ("make_folder", "write", "sync_path", "rename", "remove_file", "remove_folder"):
        monkeypatch.setattr(files, name, getattr(disk, name))
    monkeypatch.setattr(tensor_file, "save", disk.save)
    folder = tmp_path / "real" / "run" / "checkpoints"
    for update in (1, 2, 2, 3):
        write_checkpoint(folder, update, state(update))
        acknowledged = update
        retain(folder, keep_last=2)
    assert crashes > 180
    assert seen == {0, 1, 2, 3}
