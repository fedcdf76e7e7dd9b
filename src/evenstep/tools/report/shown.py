"""Texts, images and histograms of `shown.jsonl`, the newest few of each name."""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from evenstep.tools.report.files import Files

KEPT = 6
"""Of each name."""

_MAX_IMAGE_BYTES = 2_000_000
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownItem:
    """Something that was shown.

    Args:
        text: of a text, or of an image its caption.
        image: a `data:` address, or "" where it is none.
        counts: of a histogram, in intervals of equal width from `low` to `high`.
    """

    update: int
    name: str
    kind: str
    text: str = ""
    image: str = ""
    counts: tuple[int, ...] = ()
    low: float = 0.0
    high: float = 0.0


def read_shown(files: Files, name: str) -> list[ShownItem]:
    """The newest of each name, by name and update."""
    newest: dict[str, list[tuple[int, dict[str, object]]]] = {}
    for update, content in files.lines(name):
        newest.setdefault(str(content.get("name", "")), []).append((update, content))
    found: list[ShownItem] = []
    for title in sorted(newest):
        for update, content in sorted(newest[title], key=lambda line: line[0])[-KEPT:]:
            item = _item(files, update, title, content)
            if item is None:
                files.problems.append(f"What `{name}` shows as {title} at update {update} cannot be read: left out.")
            else:
                found.append(item)
    return found


def _item(files: Files, update: int, name: str, content: Mapping[str, object]) -> ShownItem | None:
    match content:
        case {"kind": "text", "text": str(text)}:
            return ShownItem(update=update, name=name, kind="text", text=text)
        case {"kind": "image", "file": str(file)}:
            image = _image(files, file)
            caption = str(content.get("caption", ""))
            item = ShownItem(update=update, name=name, kind="image", text=caption, image=image)
            return item if image else None
        case {"kind": "histogram", "edges": list(edges), "counts": list(counts)}:
            return _histogram(update, name, cast("list[object]", edges), cast("list[object]", counts))
        case _:
            return None


def _histogram(update: int, name: str, edges: list[object], counts: list[object]) -> ShownItem | None:
    whole = [count for count in counts if type(count) is int and count >= 0]
    ends = [float(edge) for edge in edges if isinstance(edge, (int, float)) and -1e300 < edge < 1e300]
    if len(whole) != len(counts) or not whole or len(ends) != len(whole) + 1 or not all(map(math.isfinite, ends)):
        return None
    return ShownItem(update=update, name=name, kind="histogram", counts=tuple(whole), low=ends[0], high=ends[-1])


def _image(files: Files, name: str) -> str:
    path = (files.folder / name).resolve()
    try:
        if not path.is_relative_to(files.folder.resolve()) or path.stat().st_size > _MAX_IMAGE_BYTES:
            return ""
        content = path.read_bytes()
    except (OSError, ValueError):
        return ""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}" if content.startswith(_PNG) else ""
