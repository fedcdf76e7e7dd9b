"""Files of tensors and exported weights are what the safetensors library means by its format."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from evenstep.checkpoint import CheckpointReader, UnreadableError, export_weights, write_checkpoint
from evenstep.checkpoint.tensor_file import CHUNK_BYTES, DTYPE_NAMES, write_tensors
from evenstep.errors import CheckpointError


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


class Tied(nn.Module):
    """Two layers that are one, and a count."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def run_of(folder: Path, model: nn.Module | None = None, **more: Any) -> Path:
    model = model or Tied()
    averages = {
        name: value.float() + 1
        for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
    }
    learned = {"task_coefficients.log_variance": torch.zeros(2)}
    state = {
        "model": {**model.state_dict(), **learned, **more},
        "ema": {name: value.detach() for name, value in averages.items()},
        "optimizer": {"momentum": torch.zeros(4)},
    }
    write_checkpoint(folder / "checkpoints", 3, state)
    return folder


def test_the_library_reads_what_is_exported(tmp_path: Path) -> None:
    model, other = Tied(), Tied(2)
    file = export_weights(run_of(tmp_path), tmp_path / "out" / "model.safetensors")
    state = model.state_dict()
    read = load_file(file)
    assert sorted(read) == sorted(name for name in state if name != "head.weight")
    assert all(torch.equal(value, state[name]) for name, value in read.items())
    assert load_model(other, file) == (set(), [])
    assert torch.equal(other.head.weight, model.embed.weight)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_is_floating_is_converted_and_nothing_else(tmp_path: Path) -> None:
    run = run_of(tmp_path, mask=torch.tensor([0.0, -torch.inf]))
    read = load_file(export_weights(run, tmp_path / "a.safetensors", dtype="bf16"))
    assert read["embed.weight"].dtype == torch.bfloat16
    assert torch.equal(read["embed.weight"], Tied().embed.weight.bfloat16())
    assert read["norm.num_batches_tracked"].dtype == torch.int64
    assert read["mask"].tolist() == [0.0, -torch.inf]


def test_a_fault_at_any_operation_leaves_the_whole_file_or_none(tmp_path: Path, failing_disk: Any) -> None:
    run = run_of(tmp_path)
    for fail_at in range(100):
        disk, to = failing_disk(fail_at), tmp_path / f"at-{fail_at}" / "model.safetensors"
        try:
            with disk:
                export_weights(run, to)
        except CheckpointError as error:
            assert "could not be written" in str(error)
        if to.exists():
            assert "embed.weight" in load_file(to)
        assert disk.failed or to.exists()
        if not disk.failed:
            break
    assert 4 < fail_at < 99
