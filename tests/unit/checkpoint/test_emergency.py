"""What one rank saves when its run has failed, without any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import (
    Shard,
    clean_leftovers,
    find_failure,
    read_checkpoint,
    write_checkpoint,
    write_emergency,
    write_failure,
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
    with pytest.raises(CheckpointError, match=r"`model\.w` is cut over ranks, but one process alone"):
        write_emergency(folder, 4, {"model": {"w": part}})
    assert list(folder.iterdir()) == []


def test_a_failure_is_found_by_itself_its_checkpoint_or_its_run(tmp_path: Path, state: State) -> None:
    run = tmp_path / "run"
    step = write_checkpoint(run / "checkpoints", 4, state(4))
    batch = {"update": 5, "microbatches": [{"index": 0, "data": (torch.ones(2), "text")}]}
    failures = [write_failure(run, 5, rank, batch) for rank in (1, 0)]
    assert failures[0] == run / "failures" / "update-00000005-rank-00001"
    assert find_failure(failures[0]) == failures[0]
    assert find_failure(step) == find_failure(run) == failures[1]
    found: Any = read_checkpoint(failures[1]).state["failure"]
    assert found["microbatches"][0]["data"][1] == "text"
    assert (run / "latest").read_text() == "step-00000004\n"
    with pytest.raises(CheckpointError, match="there is no failure of update 4"):
        find_failure(run / "checkpoints" / "step-00000003")
