"""Tensors cut over ranks (here threads), saved together and read in any other layout; forged tables are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenstep.checkpoint import (
    AsyncWriter,
    CheckpointReader,
    Mirror,
    Shard,
    read_checkpoint,
    tensor_file,
    verify,
    write_checkpoint,
)
from evenstep.errors import CheckpointError

WEIGHT = torch.arange(35.0).view(7, 5)


def cut(whole: Tensor, rank: int, ranks: int, dim: int = 0) -> Shard:
    """Even slices, of which the last may be short or empty."""
    size = -(-whole.shape[dim] // ranks)
    begin = min(rank * size, whole.shape[dim])
    local = whole.narrow(dim, begin, min(size, whole.shape[dim] - begin)).clone()
    offsets = tuple(begin if each == dim else 0 for each in range(whole.ndim))
    return Shard(local=local, shape=tuple(whole.shape), offsets=offsets)


def state(group: Any, scale: float = 1.0) -> dict[str, Any]:
    lonely = group.rank == group.ranks - 1
    return {
        "model": {"w": cut(WEIGHT * scale, group.rank, group.ranks), "b": torch.ones(3) * scale},
        "owned": {
            "step": Shard(local=torch.tensor(4.0) if lonely else torch.empty(0), shape=(), offsets=()),
            "across": cut(WEIGHT.bfloat16() * scale, group.rank, group.ranks, dim=1),
        },
        "rank": group.rank,
    }


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writers=st.integers(1, 4), readers=st.integers(1, 4), dim=st.integers(0, 1))
def test_any_number_of_ranks_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, on_ranks: Any, writers: int, readers: int, dim: int
) -> None:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    on_ranks(writers, lambda group: write_checkpoint(folder, 3, state(group), group=group))

    def read(group: Any) -> None:
        wanted = cut(WEIGHT, group.rank, group.ranks, dim)
        reader = CheckpointReader(folder)
        reader.load(lambda name: name.startswith("model/"))
        block = reader.tensor("model/w", wanted.offsets, tuple(wanted.local.shape))
        bias = reader.read(reader.state["model"]["b"])
        reader.verify(group)
        assert torch.equal(block, wanted.local)
        assert bias.tolist() == [1.0, 1.0, 1.0]
        assert reader.state["model"]["w"].is_meta
        assert torch.equal(reader.state["owned"]["across"], WEIGHT.bfloat16())  # what is no outline is read whole

    on_ranks(readers, read)


def test_ranks_with_other_tensors_are_an_error_on_all(folder: Path, on_ranks: Any) -> None:
    def write(group: Any) -> None:
        mine: dict[str, Any] = state(group)
        if group.rank == 1:
            mine["model"]["extra"] = torch.ones(1)
        with pytest.raises(CheckpointError):
            write_checkpoint(folder, 3, mine, group=group)

    on_ranks(2, write)
    assert not list(folder.iterdir())


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all_and_leaves_nothing(
    folder: Path, on_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tensor_file.save

    def full(path: Path, values: Any) -> None:
        if path.name.startswith("rank-00001"):
            raise OSError(28, "No space left on device")
        save(path, values)

    def write(group: Any) -> None:
        with pytest.raises(CheckpointError):
            write_checkpoint(folder, 3, state(group), group=group)

    monkeypatch.setattr(tensor_file, "save", full)
    on_ranks(2, write)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("rows", [(0, 4, 1, 5), (0, 4, 5, 7), (0, 4, 2, 5)], ids=["twice", "a hole", "both"])
def test_pieces_that_do_not_make_up_their_tensor_are_an_error_on_all(
    folder: Path, rows: tuple[int, ...], on_ranks: Any
) -> None:
    def write(group: Any) -> None:
        begin, end = rows[2 * group.rank : 2 * group.rank + 2]
        shard = Shard(local=WEIGHT[begin:end].clone(), shape=(7, 5), offsets=(begin, 0))
        with pytest.raises(CheckpointError):
            write_checkpoint(folder, 3, {"model": {"w": shard}}, group=group)

    on_ranks(2, write)


@pytest.mark.parametrize("lost", [None, "rank-00001.safetensors", "state.json"])
def test_ranks_copy_their_parts_and_the_copy_counts_when_all_are_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str | None, on_ranks: Any
) -> None:
    put = MemoryFileSystem.put_file

    def put_unless_lost(store: MemoryFileSystem, local: str, remote: str) -> None:
        if Path(local).name != lost:
            put(store, local, remote)

    MemoryFileSystem.store.clear()
    mirror = Mirror("memory://copies", "run")

    def save(group: Any, scale: float = 1.0) -> tuple[Path | None, str]:
        writer = AsyncWriter(folder, group=group, mirror=mirror)
        writer.begin(3, state(group, scale))
        saved = writer.wait()
        assert saved is not None
        return saved.path, str(saved.error or "")

    # the files of an earlier save must not be taken for those of this one
    assert on_ranks(3, lambda group: save(group, 5.0))[0][1] == ""
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_unless_lost)
    for path, error in on_ranks(3, save):
        assert path == folder / "step-00000003"  # here it is, whatever becomes of the copy
        assert (f"{lost} is missing" in error) if lost else error == ""
    assert verify(folder).ranks == 3
    assert mirror.steps() == ([] if lost else ["step-00000003"])
    if not lost:
        fetched = mirror.fetch("step-00000003", tmp_path / "fetched")
        assert torch.equal(read_checkpoint(fetched).state["model"]["w"], WEIGHT)
    MemoryFileSystem.store.clear()
