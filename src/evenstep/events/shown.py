"""Texts and images of a run, each under a name at an update. Making one waits for the device."""

import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

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
    """An image of 8 bits per channel, with a caption.

    Args:
        values: shape [height, width] or [1, height, width], both grey, or [3, height, width], a tensor or an array of
            `uint8`, or of floating numbers from 0 to 1.

    >>> Image(torch.tensor([[0.0, 0.5, 1.0]])).pixels[..., 0].tolist()
    [[0, 128, 255]]
    """

    __slots__ = ("caption", "pixels")

    def __init__(self, values: Any, caption: str = "") -> None:
        pixels = _array(values)
        if pixels.ndim == 2:
            pixels = pixels[None]
        is_floating = np.issubdtype(pixels.dtype, np.floating) and bool(((pixels >= 0) & (pixels <= 1)).all())
        has_shape = pixels.ndim == 3 and pixels.shape[0] in (1, 3) and 0 not in pixels.shape
        if not has_shape or (pixels.dtype != np.uint8 and not is_floating):
            raise ArgumentError(
                f"`values` of an image must be `uint8`, or floating numbers from 0 to 1, of shape [height, width], "
                f"[1, height, width] or [3, height, width], but are {pixels.dtype} of shape {list(pixels.shape)}.",
                field="values",
            )
        if is_floating:
            pixels = np.rint(pixels * 255).astype(np.uint8)
        self.pixels = pixels.transpose(1, 2, 0).copy()
        self.caption = caption

    def png(self) -> bytes:
        """PNG file (ISO/IEC 15948) of the image: unfiltered rows, compressed."""
        height, width, channels = self.pixels.shape
        rows = b"".join(b"\0" + row.tobytes() for row in self.pixels)
        header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
        chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


Value: TypeAlias = Text | Image


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Event):
    """`value` is shown under `name`, such as "valid/digits": a path of letters, digits, `_`, `-` and `.`."""

    name: str
    value: Value = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ArgumentError(
                f"`name` of a text or image must be letters, digits, `_`, `-` and `.`, in parts divided by "
                f"`/`, but is {self.name!r}.",
                field="name",
            )


def _array(values: Any) -> "np.ndarray[Any, Any]":
    if not isinstance(values, Tensor):
        return np.asarray(values)
    given = values.detach().cpu()
    return (given.float() if given.dtype in (torch.bfloat16, torch.float16) else given).numpy()
