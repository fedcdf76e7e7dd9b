import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from evenstep.errors import ArgumentError
from evenstep.events import Image, Storage, Text
from refused import refused


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


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(2),
        torch.zeros(4, 3, 2, 2),
        torch.zeros(4, 4, 3),
        torch.zeros(3, 0, 2),
        torch.full((2, 2), 1.5),
        torch.full((2, 2), float("nan")),
        torch.zeros(2, 2, dtype=torch.int64),
        "text",
    ],
)
def test_what_is_no_image_is_refused(values: Any) -> None:
    with refused(ArgumentError, "values"):
        Image(values)


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", "a b", "a/", "ä"])
def test_a_name_that_could_be_no_file_is_refused(name: str) -> None:
    with refused(ArgumentError, "name"):
        Storage().show(name, Text("x"), update=1)


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
