"""Texts, images and histograms of a run, each under a name at an update. Making one waits for the device."""

import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor

from evenstep.errors import ArgumentError
from evenstep.events.event import Event

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


@final
@dataclass(frozen=True, slots=True)
class Text:
    """A text, such as the output of a language model.

    >>> Text("once upon a time").text
    'once upon a time'
    """

    text: str


@final
class Image:
    """An image, of 8 bits per channel.

    Args:
        values: shape [height, width], [1, height, width] (both grey) or [3, height, width] (red, green, blue), a tensor
            or an array of `uint8`, or of floating numbers from 0 to 1.
        caption: text beside the image.

    Raises:
        ArgumentError: another shape or other numbers.

    Attributes:
        pixels: `uint8`, shape [height, width, 1 or 3].

    >>> Image(torch.tensor([[0.0, 0.5, 1.0]])).pixels[..., 0].tolist()
    [[0, 128, 255]]
    """

    __slots__ = ("caption", "pixels")

    def __init__(self, values: Any, caption: str = "") -> None:
        pixels = _array(values)
        if pixels.ndim == 2:
            pixels = pixels[None]
        if pixels.ndim != 3 or pixels.shape[0] not in (1, 3) or 0 in pixels.shape:
            raise ArgumentError(
                f"`values` of an image must have shape [height, width], [1, height, width] or [3, height, width], but "
                f"have {list(pixels.shape)}.",
                field="values",
            )
        if pixels.dtype != np.uint8:
            if not np.issubdtype(pixels.dtype, np.floating) or not bool(((pixels >= 0) & (pixels <= 1)).all()):
                raise ArgumentError(
                    f"`values` of an image must be `uint8`, or floating numbers from 0 to 1, but are {pixels.dtype} "
                    f"from {pixels.min()} to {pixels.max()}; rescale them.",
                    field="values",
                )
            pixels = np.rint(pixels * 255).astype(np.uint8)
        self.pixels = pixels.transpose(1, 2, 0).copy()
        self.caption = caption

    def png(self) -> bytes:
        """PNG file (ISO/IEC 15948) of the image: unfiltered rows, compressed.

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
    """Numbers of values in `bins` intervals of equal width, from the smallest to the largest value.

    Args:
        values: a tensor or an array of any shape.
        bins: number of intervals.

    Raises:
        ArgumentError: no values.

    Attributes:
        edges: bins + 1 edges of the intervals; a value on the last edge is in the last interval.
        counts: number of values in each interval.
        num_not_finite: number of values that are inf or NaN, which are in no interval.

    >>> histogram = Histogram(torch.tensor([0.0, 1.0, 1.0, float("nan")]), bins=2)
    >>> histogram.edges, histogram.counts, histogram.num_not_finite
    ([0.0, 0.5, 1.0], [1, 2], 1)
    """

    __slots__ = ("counts", "edges", "num_not_finite")

    def __init__(self, values: Any, bins: int = 64) -> None:
        given = _array(values).reshape(-1)
        if not given.size:
            raise ArgumentError("`values` of a histogram must be at least one, but are none.", field="values")
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
    """`value` is shown under `name`, such as "valid/digits"."""

    name: str
    value: Value = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ArgumentError(
                f"the name of what is shown must be letters, digits, `_`, `-` and `.`, in parts divided by `/`, but is "
                f"{self.name!r}.",
                field="name",
            )


def _array(values: object) -> "np.ndarray[Any, Any]":
    if isinstance(values, Tensor):
        one = values.detach()
        return (one.float() if one.dtype in (torch.bfloat16, torch.float16) else one).cpu().numpy()
    return np.asarray(values)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
