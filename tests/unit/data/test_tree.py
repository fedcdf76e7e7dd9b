from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from evenstep.data.tree import can_pin, pin


class Part:
    """Stands for anything that can be pinned, without an accelerator."""

    def pin_memory(self) -> str:
        return "pinned"


class Pair(NamedTuple):
    inputs: object
    targets: object


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Part(), "pinned"),
        ([Part(), 3], ["pinned", 3]),
        ((Part(), "text"), ("pinned", "text")),
        ({"inputs": Part(), "names": ["a"]}, {"inputs": "pinned", "names": ["a"]}),
        (Pair(Part(), [Part()]), Pair("pinned", ["pinned"])),
        (OrderedDict(inputs=(Part(),)), OrderedDict(inputs=("pinned",))),
        (None, None),
    ],
)
def test_every_part_is_pinned_and_every_type_kept(batch: object, expected: object) -> None:
    pinned = pin(batch)
    assert pinned == expected
    assert type(pinned) is type(expected)


def test_a_mapping_keeps_what_it_holds_besides_its_items() -> None:
    batch = defaultdict(list, inputs=Part())
    pinned = pin(batch)
    assert isinstance(pinned, defaultdict)
    assert pinned["inputs"] == "pinned"
    assert pinned["missing"] == []
    assert isinstance(batch["inputs"], Part)


def test_a_mapping_that_cannot_be_changed_is_made_anew() -> None:
    assert pin(MappingProxyType({"inputs": Part()})) == {"inputs": "pinned"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_pinned_where_there_is_an_accelerator() -> None:
    assert can_pin()
    pinned = pin({"inputs": torch.zeros(3)})
    assert isinstance(pinned, dict)
    assert pinned["inputs"].is_pinned()


def test_a_tensor_of_a_device_stays_there() -> None:
    there = torch.ones(2, device="meta")  # which can't be pinned: neither can one of an accelerator
    assert pin({"x": there})["x"] is there  # pyright: ignore[reportIndexIssue]
