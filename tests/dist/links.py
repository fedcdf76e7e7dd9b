"""Finds links of Markdown pages that lead to no file, and to no headline of one."""

import re
from pathlib import Path

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def relative_links(text: str) -> list[str]:
    """The targets of `text`'s links that are no addresses.

    >>> relative_links("[a](docs/a.md) [b](https://b) [c](#c)")
    ['docs/a.md', '#c']
    """
    found = _LINK.findall(_FENCE.sub("", text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchor(headline: str) -> str:
    """What a headline is called in a link.

    >>> anchor("## A `DataLoader` as data")
    'a-dataloader-as-data'
    """
    words = re.sub(r"[^\w\s-]", "", headline.lstrip("#").strip().lower())
    return re.sub(r"[\s]+", "-", words).strip("-")


def anchors(text: str) -> set[str]:
    """What may stand after the `#` of a link to a page."""
    return {anchor(line) for line in _FENCE.sub("", text).splitlines() if line.startswith("#")}


def broken(root: Path) -> list[str]:
    """The links of all pages of a checkout that lead nowhere, with their pages."""
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "recipes").rglob("*.md")]
    lacking: list[str] = []
    for page in pages:
        for link in relative_links(page.read_text(encoding="utf-8")):
            target, _, name = link.partition("#")
            file = page.parent / target if target else page
            is_page = bool(name) and file.suffix == ".md" and file.exists()
            if not file.exists() or (is_page and name not in anchors(file.read_text(encoding="utf-8"))):
                lacking.append(f"{page.relative_to(root)}: {link}")
    return lacking
