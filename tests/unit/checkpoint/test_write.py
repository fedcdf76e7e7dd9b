"""A checkpoint is complete or not there, whatever fails, and says what failed."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.checkpoint import (
    clean_leftovers,
    complete_checkpoints,
    read_checkpoint,
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


def test_a_failure_after_the_checkpoint_got_its_name_says_that_it_is_complete(folder: Path, state: State, failing_disk):
    counted = failing_disk()
    with counted:
        write_checkpoint(folder, 1, state(1))
    last_sync = max(i for i, name in enumerate(counted.operations) if name == "sync_path")
    with failing_disk(last_sync), pytest.raises(CheckpointError):
        write_checkpoint(folder, 2, state(2))
    assert update_of(folder) == 2


def test_an_emergency_save_is_an_ordinary_checkpoint_that_is_made_once(folder: Path, state: State) -> None:
    assert write_emergency(folder, 4, state(4)) == folder / "step-00000004"
    assert read_checkpoint(folder).update == 4
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]
    assert write_emergency(folder, 4, state(5)) is None
    (folder / ".emergency-step-00000005").mkdir()
    assert write_emergency(folder, 5, state(5)) is None
    assert len(clean_leftovers(folder)) == 1
    assert write_emergency(folder, 5, state(5)) is not None
