"""A state is the same after it was split into tensors and JSON and put together."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evenstep.checkpoint.state import pack, unpack
from evenstep.checkpoint.tensor_file import DTYPE_NAMES
from evenstep.errors import CheckpointError
from refused import refused


def round_trip(tree: object) -> object:
    tensors, skeleton = pack(tree, "root")
    return unpack(json.loads(json.dumps(skeleton)), tensors)


def same(left: object, right: object) -> bool:
    """Equal in values, types and order of keys; nan equals nan, -0.0 does not equal 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            type(a) is type(b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or (left == right and str(left) == str(right))
    return left == right


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from([*DTYPE_NAMES]))
    seed = draw(st.integers(0, 99))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return tensor.transpose(0, -1) if draw(st.booleans()) and tensor.ndim > 1 else tensor


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just(2**127 + 1), st.just(-0.0), tensors()
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
    assert same(round_trip(tree), tree)


def test_tied_tensors_are_stored_once_and_come_back_tied():
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    packed, skeleton = pack({"embedding": weight, "head": weight}, "model")
    assert list(packed) == ["embedding"]
    back = unpack(skeleton, packed)
    assert isinstance(back, dict)
    assert back["embedding"] is back["head"]


def test_paths_that_read_the_same_get_different_names():
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)}
    packed, _ = pack(tree, "x")
    assert [int(tensor) for tensor in packed.values()] == [1, 2, 3, 4]
    assert list(packed) == ["a.b", "a.b~1", "0", "0~1"]
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((one, one) for one in (Counter({3: 1, 7: 2}), {1, "two", (3, 4)}, frozenset())),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(int, b=1, a=2), {"b": 1, "a": 2}),
        *((number, number.item()) for number in (np.float32(0.1), np.int64(7), np.bool_(True), np.float64("inf"))),
    ],
)
def test_other_containers_come_back_and_other_dicts_and_numbers_as_plain_ones(value: object, expected: object):
    back = round_trip(value)
    assert same(back, expected)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2),
        b"raw",
        Point(1, 2),
        object(),
        deque([1]),
        {(1, 2): 3},
        {True: 3},
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
    ],
)
def test_what_has_no_exact_form_is_refused_by_its_path(value: object):
    with refused(CheckpointError, "hooks.best.0"):
        pack({"best": [value]}, "hooks")
