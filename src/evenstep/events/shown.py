"""What a run shows beside numbers: a text, an image, a histogram, under a name at an update.

A value is read when it is made, so that nothing holds on to a tensor that changes, and waits for its device: show
something now and then, not in each update. What becomes of it is the writers' business.
"""

import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor

from evenstep.arguments import said
from evenstep.errors import ArgumentError, clause
from evenstep.events.event import Event

_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@final
@dataclass(frozen=True, slots=True)
class Text:
    """A text, such as what a language model has written.

    >>> Text("once upon a time").text
    'once upon a time'
    """

    text: str


@final
class Image:
    """An image, of 8 bits per channel.

    Args:
        values: shape [height, width], [1, height, width] (both grey) or [3, height, width] (red, green, blue), a tensor
            or an array; whole numbers of 8 bits, or floating ones from 0 to 1.
        caption: what it shows.

    Raises:
        ArgumentError: another shape, other numbers, or some that are not finite.

    Attributes:
        pixels: `uint8`, shape [height, width, 1 or 3].

    >>> Image(torch.tensor([[0.0, 0.5, 1.0]])).pixels[..., 0].tolist()
    [[0, 128, 255]]
    """

    __slots__ = ("caption", "pixels")

    def __init__(self, values: Any, caption: str = "") -> None:
        given = _array("Image", values)
        grey = given[None] if given.ndim == 2 else given
        if grey.ndim != 3 or grey.shape[0] not in (1, 3) or 0 in grey.shape:
            raise ArgumentError(
                f"`Image` takes shape [height, width], [1, height, width] or [3, height, width], but was given "
                f"{list(given.shape)}; channels come first, as in torch, and a batch is several images.",
                field="Image",
            )
        if grey.dtype != np.uint8:
            if not np.issubdtype(grey.dtype, np.floating) or not bool(((grey >= 0) & (grey <= 1)).all()):
                what = f"{grey.dtype} from {grey.min()} to {grey.max()}"
                raise ArgumentError(
                    f"`Image` takes `uint8`, or floating numbers from 0 to 1, but was given {what}; bring them there, "
                    f"for instance by `(x - x.min()) / (x.max() - x.min())`.",
                    field="Image",
                )
            grey = np.rint(grey * 255).astype(np.uint8)
        self.pixels = np.ascontiguousarray(grey.transpose(1, 2, 0))
        self.caption = caption

    def png(self) -> bytes:
        """The image as a PNG file (ISO/IEC 15948): unfiltered rows, compressed.

        >>> Image(torch.zeros(2, 2)).png()[:8]
        b'\\x89PNG\\r\\n\\x1a\\n'
        """
        height, width, channels = self.pixels.shape
        rows = b"".join(b"\0" + row.tobytes() for row in self.pixels)
        header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


@final
class Histogram:
    """How many of some values are in each of `bins` intervals of equal width, from the smallest to the largest.

    Args:
        values: a tensor or an array of any shape.
        bins: how many intervals.

    Raises:
        ArgumentError: no number of intervals, or no values.

    Attributes:
        edges: of the intervals, one more than there are; a value on the last one is in the last interval.
        counts: of the values in each.
        num_not_finite: how many values are inf or NaN, and in none.

    >>> histogram = Histogram(torch.tensor([0.0, 1.0, 1.0, float("nan")]), bins=2)
    >>> histogram.edges, histogram.counts, histogram.num_not_finite
    ([0.0, 0.5, 1.0], [1, 2], 1)
    """

    __slots__ = ("counts", "edges", "num_not_finite")

    def __init__(self, values: Any, bins: int = 64) -> None:
        given = _array("Histogram", values).reshape(-1)
        if not given.size:
            raise ArgumentError(
                "`Histogram` takes at least one value, but was given none; leave it out then.", field="Histogram"
            )
        if np.iscomplexobj(given):
            raise ArgumentError(
                "`Histogram` takes real numbers, but was given complex ones; give `values.abs()`.", field="Histogram"
            )
        wide = given.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        counts, edges = np.histogram(finite, bins=bins)
        self.counts = cast("list[int]", counts.tolist())
        self.edges = cast("list[float]", edges.tolist())
        self.num_not_finite = int(given.size - finite.size)


Value: TypeAlias = Text | Image | Histogram


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Event):
    """A hook or a task has shown `value` under `name`, such as "valid/digits"."""

    name: str
    value: Value = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if not all(_PART.fullmatch(part) for part in self.name.split("/")):
            raise ArgumentError(
                f"what is shown must have a name of letters, digits, `_`, `-` and `.`, in parts divided by `/`, as it "
                f"names a file, but it is {self.name!r}; rename it."
            )


def _array(name: str, values: object) -> "np.ndarray[Any, Any]":
    if isinstance(values, Tensor):
        one = values.detach()
        return (one.float() if one.dtype in (torch.bfloat16, torch.float16) else one).cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ArgumentError(
            f"`{name}` takes a tensor or an array, but was given {said(values)}: {clause(error)}.", field=name
        ) from error
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise ArgumentError(
            f"`{name}` takes a tensor or an array of numbers, but was given {said(values)}.", field=name
        )
    return array


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
