"""What a disk is given is in the file, whether it goes past the system's cache or not."""

import errno
import os
from collections.abc import Callable
from fcntl import F_GETFL, fcntl
from io import FileIO
from pathlib import Path

import pytest
import torch

from evenstep.checkpoint import storage
from evenstep.checkpoint.storage import BLOCK_BYTES

MIB = 1 << 20


def memory(num_bytes: int, *, beyond_block: int = 0) -> memoryview:
    """Random bytes that begin so many bytes beyond a block."""
    buffer = torch.randint(0, 256, (num_bytes + 2 * BLOCK_BYTES,), dtype=torch.uint8)
    begin = -buffer.data_ptr() % BLOCK_BYTES + beyond_block
    return buffer[begin : begin + num_bytes].numpy().data


class Watched(FileIO):
    """Notes which pieces go past the cache; refuses those with `code`."""

    def __init__(self, path: Path, code: int = 0, after: int = 0) -> None:
        super().__init__(path, "xb")
        self.past_cache: list[int] = []
        self.code, self.after = code, after

    def write(self, b: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - what `write` gives
        if not fcntl(self, F_GETFL) & os.O_DIRECT:
            return super().write(b)
        if self.code and len(self.past_cache) == self.after:
            raise OSError(self.code, os.strerror(self.code))
        # as a disk may: not all at once
        self.past_cache.append(super().write(b[: max(len(b) // 2 // BLOCK_BYTES, 1) * BLOCK_BYTES]))
        return self.past_cache[-1]


@pytest.mark.parametrize("place", ["here", "memory"])
def test_pieces_of_any_size_and_place_are_written_whole(place: str, tmp_path: Path) -> None:
    shared = Path("/dev/shm") / f"evenstep-{os.getpid()}"
    path = shared if place == "memory" else tmp_path / "file"
    pieces = [memory(2 * MIB), memory(MIB + 5), memory(3 * MIB), b"x", memory(MIB, beyond_block=8), memory(0)]
    file = storage.create(path)
    try:
        for piece in pieces:
            storage.write(file, piece)
        storage.sync(file)
        storage.close(file)
        assert path.read_bytes() == b"".join(pieces)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("piece", "past_cache"),
    [
        (lambda: memory(2 * MIB), 2 * MIB),
        (lambda: memory(MIB + 5), MIB),
        (lambda: memory(2 * MIB, beyond_block=64), 0),
        (lambda: memory(MIB - BLOCK_BYTES), 0),
    ],
    ids=["whole blocks", "and a rest", "beside blocks", "small"],
)
def test_whole_blocks_of_large_pieces_go_past_the_cache(
    piece: Callable[[], memoryview], past_cache: int, tmp_path: Path
) -> None:
    with Watched(tmp_path / "file") as file:
        data = piece()
        storage.write(file, data)
        assert sum(file.past_cache) == past_cache
        assert not fcntl(file, F_GETFL) & os.O_DIRECT
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_does_not_take_blocks_so_gets_them_through_the_cache(
    code: int, after: int, tmp_path: Path
) -> None:
    data = memory(2 * MIB)
    with Watched(tmp_path / "file", code, after) as file:
        storage.write(file, data)
        assert len(file.past_cache) == after
    assert (tmp_path / "file").read_bytes() == data


def test_any_other_failure_of_the_disk_is_raised(tmp_path: Path) -> None:
    with Watched(tmp_path / "file", errno.ENOSPC, after=1) as file, pytest.raises(OSError, match="No space left"):
        storage.write(file, memory(2 * MIB))
