"""What one rank saves when its run has failed, without any other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenstep.checkpoint import (
    Shard,
    clean_leftovers,
    read_checkpoint,
    write_checkpoint,
    write_emergency,
)
from evenstep.errors import CheckpointError

State = Callable[[int], dict[str, object]]


def test_it_is_an_ordinary_checkpoint(folder: Path, state: State) -> None:
    assert write_emergency(folder, 4, state(4)) == folder / "step-00000004"
    assert read_checkpoint(folder).update == 4
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]


def test_what_is_saved_already_or_by_another_rank_is_not_saved_again(folder: Path, state: State) -> None:
    write_checkpoint(folder, 4, state(4))
    assert write_emergency(folder, 4, state(5)) is None
    (folder / ".emergency-step-00000005").mkdir()
    assert write_emergency(folder, 5, state(5)) is None
    assert len(clean_leftovers(folder)) == 1
    assert write_emergency(folder, 5, state(5)) is not None


def test_a_rank_that_holds_a_part_only_says_so(folder: Path) -> None:
    part = Shard(local=torch.ones(2), shape=(4,), offsets=(0,))
    with pytest.raises(CheckpointError):
        write_emergency(folder, 4, {"model": {"w": part}})
    assert list(folder.iterdir()) == []
