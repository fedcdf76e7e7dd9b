"""The text of the project's page on an index: the README, which must stand alone there.

Links into the repository would lead nowhere, so they become what they say, with the file that they meant, which is in
the source distribution; links to elsewhere stay.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


class LongDescription(MetadataHookInterface):
    """Gives the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the field into the project's metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": standing_alone(text)}


def standing_alone(text: str) -> str:
    """`text` without links into the repository.

    >>> standing_alone("see [the library](docs/library.md), [`digits`](recipes/digits/README.md) and [x](https://y)")
    'see the library (docs/library.md), `digits` (recipes/digits/README.md) and [x](https://y)'
    """
    return _LINK.sub(
        lambda found: f"{found[1].strip()} ({found[2]})" if found[1].strip("`") != found[2] else found[1], text
    )
