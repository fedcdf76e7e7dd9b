"""Names of checkpoints, and what a path means."""

from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.checkpoint import complete_checkpoints, write_checkpoint
from evenstep.checkpoint.folders import locate
from evenstep.errors import CheckpointError

State = Callable[[int], dict[str, object]]


def test_checkpoints_are_listed_by_update_and_only_with_a_manifest(folder: Path, state: State):
    for update in (20, 3, 100_000_000):
        write_checkpoint(folder, update, state(update))
    for name in ("step-00000050", ".saving-step-00000060", "notes"):
        (folder / name).mkdir()
    (folder / ".saving-step-00000060" / "manifest.json").write_text("{}")
    (folder / "step-00000070").write_text("a file")
    assert [path.name for path in complete_checkpoints(folder)] == [
        "step-00000003",
        "step-00000020",
        "step-100000000",
    ]


def test_a_run_its_checkpoints_or_a_step_all_mean_the_checkpoint(folder: Path, state: State):
    write_checkpoint(folder, 1, state(1))
    newest = write_checkpoint(folder, 2, state(2))
    assert locate(folder.parent) == locate(folder) == locate(newest) == newest


def test_a_file_of_the_run_that_names_a_step_means_that(folder: Path, state: State):
    old, link = write_checkpoint(folder, 1, state(1)), folder.parent / "best"
    write_checkpoint(folder, 2, state(2))
    link.write_text(f"{old.name}\n")
    assert locate(link) == old
    link.write_text("step-00000009\n")
    with pytest.raises(CheckpointError):
        locate(link)
    link.write_text("something else\n")
    with pytest.raises(CheckpointError):
        locate(link)
