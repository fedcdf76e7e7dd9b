"""The files are what the safetensors library means by its format."""

import json
from pathlib import Path
from zlib import crc32

import safetensors.torch
import torch
from torch import nn

from evenstep.checkpoint import CheckpointReader
from evenstep.checkpoint.manifest import FileEntry, manifest_bytes, new_manifest
from evenstep.checkpoint.state import DTYPE_NAMES
from evenstep.checkpoint.tensorfile import CHUNK_BYTES, TensorFile


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


def read(data: bytes, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that has this file."""
    contents = {path.name: data, "state.json": b"{}"}
    for name, content in contents.items():
        path.with_name(name).write_bytes(content)
    files = {name: FileEntry(bytes=len(one), crc32=f"{crc32(one):08x}") for name, one in contents.items()}
    path.with_name("manifest.json").write_bytes(manifest_bytes(new_manifest(1, files)))
    reader = CheckpointReader(path.parent)
    tensors = {name.partition("/")[2]: reader.tensor(name) for name in reader.tensors}
    reader.verify()
    return tensors


def test_the_library_reads_what_is_written(tmp_path: Path):
    tensors = tensors_of_all_kinds()
    file = TensorFile(tensors)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(file.chunks()))
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].tolist() == tensor.tolist()
    assert path.stat().st_size == file.size


def test_what_the_library_writes_is_read(tmp_path: Path):
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of_all_kinds().items()}
    back = read(safetensors.torch.save(tensors, metadata={"made": "by the library"}), tmp_path / "x.safetensors")
    assert {name: tensor.tolist() for name, tensor in back.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_tensors_that_are_read_share_no_memory_and_are_aligned_as_fresh_ones(tmp_path: Path):
    tensors = {name: torch.ones(3, dtype=torch.float32) for name in "abc"}
    back = read(b"".join(TensorFile(tensors).chunks()), tmp_path / "x.safetensors")
    assert all(tensor.data_ptr() % 64 == 0 for tensor in back.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 3


def test_a_tensor_larger_than_a_chunk_is_written_and_read_in_pieces(tmp_path: Path):
    tensor = torch.arange(CHUNK_BYTES // 4 + 3, dtype=torch.int32)
    chunks = list(TensorFile({"x": tensor}).chunks())
    assert [len(chunk) for chunk in chunks[1:]] == [CHUNK_BYTES, 12]
    assert torch.equal(read(b"".join(chunks), tmp_path / "x.safetensors")["x"], tensor)


def header(content: object) -> bytes:
    encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(encoded).to_bytes(8, "little") + encoded


def entry(shape: object, begin: object, end: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
