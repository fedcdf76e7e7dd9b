"""Metrics as exact sums over ranks, and texts and images that a run shows."""

import io
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from evenstep.errors import LostRankError
from evenstep.events import Image, Record, Storage, Text

NUMBERS = st.integers(-1000, 1000).map(float)
ENTRIES = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from("ab"), NUMBERS, st.integers(0, 8), st.booleans()), max_size=30
)


@given(entries=ENTRIES)
def test_a_written_value_is_sum_over_sum(entries: list[tuple[int, str, float, int, bool]]) -> None:
    storage = Storage()
    for update, name, total, weight, on_device in entries:
        if on_device:
            storage.put(name, torch.tensor(total), torch.tensor(weight), update=update)
        else:
            storage.put(name, total, weight, update=update)
    keys = sorted(dict.fromkeys((update, name) for update, name, *_ in entries), key=lambda key: key[0])
    expected: list[tuple[int, str, float, float]] = []
    for update, name in keys:
        mine = [entry for entry in entries if entry[:2] == (update, name)]
        weights = sum(entry[3] for entry in mine)
        if weights:
            value = Fraction(sum(int(entry[2]) for entry in mine), weights)
            expected.append((update, name, float(value), float(weights)))
    assert storage.settle() == expected


@given(
    entries=st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(0.001, 1e6), st.integers(0, 3)), min_size=1, max_size=12)
)
def test_bits_do_not_depend_on_the_ranks(entries: list[tuple[float, float, int]]) -> None:
    storages = [Storage() for _ in range(4)]
    for total, weight, rank in entries:
        storages[rank].put("a", total, weight, update=1)
    everybody: list[Any] = []
    for storage in storages[1:]:
        storage.settle(lambda pairs: [everybody.append(pairs) or {}])
    (record,) = storages[0].settle(lambda pairs: [pairs, *everybody])
    weight = sum(Fraction(weight) for _, weight, _ in entries)
    assert record.weight == float(weight)
    assert record.value == float(sum(Fraction(total) for total, _, _ in entries) / weight)


def test_a_late_value_of_a_written_update_is_kept() -> None:
    storage = Storage()
    storage.put("a", 1.0, update=1)
    storage.put("a", 5.0, update=2)
    storage.settle()
    storage.put("a", 6.0, 2, update=1)
    assert storage.settle() == [Record(1, "a", 3.0, 2.0)]
    assert [(record.update, record.value) for record in storage.history("a")] == [(1, 1.0), (1, 3.0), (2, 5.0)]


def test_putting_never_reads_the_tensor() -> None:
    storage = Storage()
    scalar = torch.empty((), device="meta")  # a tensor without data: reading it raises
    storage.put("a", scalar, scalar, update=1)
    storage.put("a", scalar, 2.0, update=1)
    with pytest.raises((RuntimeError, NotImplementedError)):
        storage.settle()


def test_metrics_of_aborted_updates_are_dropped() -> None:
    storage = Storage()
    for update in (1, 2, 3):
        storage.put("a", float(update), update=update)
    storage.discard_from(2)
    storage.put("a", 20.0, update=2)
    assert storage.settle() == [(1, "a", 1.0, 1.0), (2, "a", 20.0, 1.0)]


def test_metrics_stay_pending_when_a_rank_is_lost() -> None:
    def lost(pairs: Any) -> Any:
        raise LostRankError("rank 1 is lost")

    storage = Storage()
    storage.put("train/loss", 6.0, 2, update=1)
    with pytest.raises(LostRankError):
        storage.settle(lost)
    storage.put("train/loss", 8.0, 2, update=2)
    storage.follow(0)
    assert [(one.update, one.value) for one in storage.settle()] == [(1, 3.0), (2, 4.0)]
    storage.put("train/loss", 8.0, 2, update=3)
    storage.follow(2)  # others have heard of it, and this rank alone has not
    assert not storage.settle()


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_png_is_the_image_bit_for_bit(shape: tuple[int, ...], kind: torch.dtype) -> None:
    levels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    values = levels.to(torch.uint8) if kind == torch.uint8 else (levels / 255).to(kind)
    expected = np.rint(values.float().numpy() * (1 if kind == torch.uint8 else 255))
    image = Image(values)
    values.fill_(0)  # the image keeps its pixels
    read = np.asarray(Pillow.open(io.BytesIO(image.png())))
    assert np.array_equal(read, expected.transpose(1, 2, 0) if shape[0] == 3 else expected.reshape(5, 7))


def test_the_first_of_a_name_and_update_is_kept_and_aborted_updates_show_nothing() -> None:
    storage = Storage()
    for text in ("first", "second"):
        storage.show("train/it", Text(text), update=1)
    mark = storage.mark()
    storage.show("train/it", Text("a try"), update=2)
    storage.drop_after(mark)
    storage.show("valid/it", Text("evaluated"), update=2)
    storage.show("it", Text("given up"), update=3)
    storage.discard_from(3)
    shown = [(one.update, one.name, one.value) for one in storage.take_shown()]
    assert shown == [(1, "train/it", Text("first")), (2, "valid/it", Text("evaluated"))]
    assert storage.take_shown() == []
