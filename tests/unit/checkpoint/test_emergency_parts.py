"""What ranks that hold parts of the state save when their run has failed, and what becomes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import Shard, discard_parts, join_parts, read_checkpoint, write_checkpoint, write_part

WEIGHT = torch.arange(12.0).view(4, 3)


def half(place: int, *, names: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    """What rank `place` of two holds: rows of one tensor, all of another, the optimizer's state of one parameter."""
    rows = Shard(local=WEIGHT[2 * place : 2 * place + 2], shape=(4, 3), offsets=(2 * place, 0))
    name = names[place]
    return {
        "model": {"weight": rows, "bias": torch.ones(3)},
        "optimizer": {"class": "SGD", "state": {name: {"step": 3.0 + place}}, "groups": [{"parameters": [name]}]},
        "ema": {},
        "trained": {name: {"now": True, "built": False}},
        "run": {"seed": 7, "place": place},
    }


def write_both(run: Path, update: int) -> None:
    for place in range(2):
        assert write_part(run, update, half(place), place=place, places=2) is not None


def test_all_parts_together_become_an_ordinary_checkpoint(tmp_path: Path) -> None:
    write_both(tmp_path, 5)
    path, said = join_parts(tmp_path)
    assert path == tmp_path / "checkpoints" / "step-00000005"
    assert "was put together from 2 parts" in said
    state: Any = read_checkpoint(path).state
    assert torch.equal(state["model"]["weight"], WEIGHT)
    assert torch.equal(state["model"]["bias"], torch.ones(3))
    assert state["optimizer"]["state"] == {"a": {"step": 3.0}, "b": {"step": 4.0}}
    assert state["optimizer"]["groups"] == [{"parameters": ["a", "b"]}]
    assert state["run"] == {"seed": 7, "place": 0}
    assert state["trained"].keys() == {"a", "b"}
    assert list(state) == ["model", "optimizer", "ema", "trained", "run"]


def test_a_missing_part_is_named_and_nothing_is_made_of_the_others(tmp_path: Path) -> None:
    write_part(tmp_path, 5, half(0), place=0, places=2)
    path, said = join_parts(tmp_path)
    assert path is None
    assert "of its 2 parts, 2 is missing" in said
    assert not (tmp_path / "checkpoints").exists()


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    write_both(tmp_path, 5)
    file = tmp_path / "emergency" / "update-00000005-part-00001-of-00002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    path, said = join_parts(tmp_path)
    assert path is None
    assert "part-00001-of-00002" in said


def test_parts_that_do_not_make_up_a_tensor_are_of_no_use(tmp_path: Path) -> None:
    write_part(tmp_path, 5, half(0), place=0, places=2)
    write_part(tmp_path, 5, half(0, names=("b", "b")), place=1, places=2)
    path, said = join_parts(tmp_path)
    assert path is None
    assert "do not make up `model/weight`" in said


def test_parts_of_shards_that_differ_in_what_all_have_are_of_no_use(tmp_path: Path) -> None:
    """As where a hook that changes the model has failed on one rank only."""
    write_part(tmp_path, 5, half(0), place=0, places=2)
    other = half(1)
    other["model"]["bias"] = torch.tensor([1.0, 1.0, 2.0])
    write_part(tmp_path, 5, other, place=1, places=2)
    path, said = join_parts(tmp_path)
    assert path is None
    assert "different `bias`" in said


@pytest.mark.parametrize("update", [5, 6])
def test_what_is_not_newer_than_the_newest_checkpoint_is_passed_over(tmp_path: Path, update: int) -> None:
    write_both(tmp_path, 5)
    write_checkpoint(tmp_path / "checkpoints", update, {"model": {}})
    assert join_parts(tmp_path) == (None, "")


def test_parts_are_deleted_when_they_are_of_no_more_use(tmp_path: Path) -> None:
    assert discard_parts(tmp_path) == []
    write_both(tmp_path, 5)
    assert len(discard_parts(tmp_path)) == 1
    assert not (tmp_path / "emergency").exists()
