"""The files are what the safetensors library means by its format."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from evenstep.checkpoint import CheckpointReader, UnreadableError, write_checkpoint
from evenstep.checkpoint.state import DTYPE_NAMES
from evenstep.checkpoint.tensor_file import CHUNK_BYTES, write_tensors


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    kinds = {str(dtype): (torch.arange(5) % 2).to(dtype) for dtype in DTYPE_NAMES}
    return kinds | {
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(()).expand(1),
        "expanded further": torch.ones(()).expand(3),
        "parameter": nn.Parameter(torch.ones(2)),
        "ü": torch.ones(1, dtype=torch.bfloat16),
    }


def test_the_library_reads_what_is_written(tmp_path: Path):
    tensors = tensors_of_all_kinds()
    path = tmp_path / "model.safetensors"
    entry, checksums = write_tensors(path, tensors)
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys() == checksums.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].tolist() == tensor.tolist()
    assert path.stat().st_size == entry.bytes


def test_a_block_is_verified_by_its_own_chunks_alone(tmp_path: Path):
    rows = CHUNK_BYTES // 4  # a row has 8 bytes, so a chunk half of these rows
    tensor = torch.arange(4 * rows, dtype=torch.int32).view(2 * rows, 2)
    step = write_checkpoint(tmp_path, 1, {"model": {"x": tensor}})
    file = step / "model.safetensors"
    data = bytearray(file.read_bytes())
    assert len(CheckpointReader(step).tensors["model/x"].pieces[0].crc32) == 4
    data[-1] ^= 1
    file.write_bytes(data)
    reader = CheckpointReader(step)
    assert torch.equal(reader.tensor("model/x", (5, 1), (rows, 1)), tensor[5 : 5 + rows, 1:])
    assert reader._compared == {("model.safetensors", "x"): {0, 1, 2}}
    with pytest.raises(UnreadableError):
        reader.verify()
