"""Files of tensors, exported weights and averages, read by the safetensors library."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from evenstep.checkpoint import (
    CheckpointReader,
    UnreadableError,
    average_checkpoints,
    export_weights,
    read_checkpoint,
    write_checkpoint,
)
from evenstep.checkpoint.state import pack, unpack
from evenstep.checkpoint.tensor_file import CHUNK_BYTES, DTYPE_NAMES
from evenstep.errors import ArgumentError, CheckpointError
from refused import refused


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


def state_of(seed: int, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)
    model = {
        "weight": weight,
        "tied": weight,
        "conversion.version": torch.randn(2, generator=generator),
        "mask": torch.tensor([0.0, -torch.inf]),
        "seen": torch.tensor([7, 8, 9] if seed == 1 else [2, 2, 2]),
        "flags": torch.tensor([True, seed == 1]),
        **more,
    }
    return {"model": model, "ema": {}, "optimizer": {"state": {"weight": {"momentum": torch.zeros(5, 3)}}}}


def saved_steps(folder: Path, count: int = 3, **more: Any) -> list[Path]:
    return [write_checkpoint(folder / "checkpoints", 10 * n, state_of(n, **more)) for n in range(1, count + 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_the_mean_in_float64_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    of = saved_steps(tmp_path, 5, dtype=dtype)
    made = average_checkpoints(of, tmp_path)
    model = read_checkpoint(made).state["model"]
    each = np.stack([state_of(n, dtype)["model"]["weight"].double().numpy() for n in range(1, 6)])
    assert model["weight"].dtype == dtype
    wanted = torch.from_numpy(each.sum(axis=0) / 5)
    assert float((model["weight"].double() - wanted).abs().max()) <= torch.finfo(dtype).eps * 2
    if dtype == torch.float64:
        assert float((model["weight"] - wanted).abs().max()) < 1e-15
    assert made == tmp_path / "average"


def test_what_no_mean_is_of_is_the_newests_and_said_and_what_is_the_same_stays(tmp_path: Path) -> None:
    made = average_checkpoints(saved_steps(tmp_path), tmp_path)
    model = read_checkpoint(made).state["model"]
    assert model["seen"].tolist() == [2, 2, 2]
    assert model["flags"].tolist() == [True, False]
    assert model["mask"].tolist() == [0.0, -torch.inf]
    assert model["tied"] is model["weight"]
    wanted = sum(state_of(n)["model"]["conversion.version"].double() for n in (1, 2, 3)) / 3
    assert torch.equal(model["conversion.version"], wanted.float())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "other", [{"more": torch.zeros(1)}, {"mask": torch.zeros(3)}, {"mask": torch.zeros(2).double()}]
)
def test_weights_that_have_no_mean_are_refused(other: dict[str, Tensor], tmp_path: Path) -> None:
    odd = write_checkpoint(tmp_path / "odd", 1, state_of(1, **other))
    with pytest.raises(CheckpointError):
        average_checkpoints([odd, *saved_steps(tmp_path, 2)], tmp_path / "averages")
    assert not (tmp_path / "averages").exists()


def test_an_average_is_made_again_but_takes_the_place_of_nothing_else(tmp_path: Path) -> None:
    of = saved_steps(tmp_path)
    average_checkpoints(of[:2], tmp_path / "averages")
    path = average_checkpoints(of, tmp_path / "averages")
    assert len(read_checkpoint(path).state["averaged"]["of"]) == 3
    for place in (tmp_path / "checkpoints", of[0]):
        with pytest.raises(ArgumentError):
            average_checkpoints(of, place.parent, name=place.name)
    assert of[0].exists()
    with refused(ArgumentError, "paths"):
        average_checkpoints([of[0], of[0]], tmp_path)


def round_trip(tree: object) -> object:
    tensors, skeleton = pack(tree, "root")
    return unpack(json.loads(json.dumps(skeleton)), tensors)


def equal(left: object, right: object) -> bool:
    """Equal in values, types and order of keys; nan equals nan, -0.0 does not equal 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            type(a) is type(b) and equal(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or (left == right and str(left) == str(right))
    return left == right


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


@st.composite
def any_tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from([*DTYPE_NAMES]))
    seed = draw(st.integers(0, 99))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return tensor.transpose(0, -1) if draw(st.booleans()) and tensor.ndim > 1 else tensor


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just(2**127 + 1), st.just(-0.0), any_tensors()
)
keys = st.one_of(st.text(max_size=6), st.integers(), st.sampled_from(["$tensor", "$dict", "a.b", "__metadata__", ""]))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(trees)
def test_every_tree_comes_back_with_its_values_types_and_order(tree: object):
    assert equal(round_trip(tree), tree)


def test_paths_that_read_the_same_get_different_names():
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)}
    packed, _ = pack(tree, "x")
    assert [int(tensor) for tensor in packed.values()] == [1, 2, 3, 4]
    assert list(packed) == ["a.b", "a.b~1", "0", "0~1"]
    assert equal(round_trip(tree), tree)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((one, one) for one in (Counter({3: 1, 7: 2}), {1, "two", (3, 4)}, frozenset(), deque([1, 2], 3))),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(int, b=1, a=2), {"b": 1, "a": 2}),
        *((number, number.item()) for number in (np.float32(0.1), np.int64(7), np.bool_(True), np.float64("inf"))),
    ],
)
def test_other_containers_come_back_and_other_dicts_and_numbers_as_plain_ones(value: object, expected: object):
    back = round_trip(value)
    assert equal(back, expected)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2),
        b"raw",
        Point(1, 2),
        object(),
        {(1, 2): 3},
        {True: 3},
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
    ],
)
def test_what_has_no_exact_form_is_refused_by_its_path(value: object):
    with refused(CheckpointError, "hooks.best.0"):
        pack({"best": [value]}, "hooks")
