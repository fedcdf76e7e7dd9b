"""The blocks of README.md and docs/, and what their readers are taken to have: `given/` holds it.

A block's language says what it is: `python`, `toml` and `json` are read by machines, `sh` are commands and `bash` whole
scripts, `text` is all else: output, formulas, pictures.
"""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GIVEN = Path(__file__).parent / "given"
PAGES = {path.stem: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
LANGUAGES = ("python", "toml", "json", "yaml", "sh", "bash", "text")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block, with the line of the page where it begins."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}.md:{self.line}"


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page, in its order; of all languages where none is named."""
    text = PAGES[page].read_text()
    found = [Block(page, text[: one.start()].count("\n") + 1, one[1], one[2]) for one in _BLOCK.finditer(text)]
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, *languages)]


def outside_of_blocks(page: str) -> str:
    """The page's prose."""
    return _BLOCK.sub("", PAGES[page].read_text())


def run(block: Block, names: dict[str, Any]) -> None:
    """Execute a block of Python; its lines are those of the page, also in a traceback."""
    exec(compile("\n" * block.line + block.text, f"{block.page}.md", "exec"), names)


def names_for(page: str) -> dict[str, Any]:
    """What a page's Python takes for granted: what the tiny recipe and `names.py` have, and `PAGE.py` over it."""
    names: dict[str, Any] = {}
    for name in ("recipe/model.py", "recipe/task.py", "names.py", f"{page}.py"):
        path = GIVEN / name
        if path.is_file():
            exec(compile(path.read_text(), str(path), "exec"), names)
    return names


def run_file(block: Block, beside: dict[str, Any]) -> str:
    """A whole run file: that of the tiny recipe with a block of TOML over it, or the block alone if it is a whole one.

    Args:
        beside: what the block's tables need of other ones.
    """
    table = tomllib.loads(block.text)
    base = {} if "name" in table else tomllib.loads((GIVEN / "recipe" / "run.toml").read_text())
    if "target" in table.get("optimizer", {}):
        del base["optimizer"]["name"]  # the one or the other
    whole = over(over(base, table), beside)
    return "\n".join(f"{key} = {_toml(value)}" for key, value in whole.items())


def over(table: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`table` with the keys of `more`, table by table."""
    both = {key: over(table[key], more[key]) for key in table.keys() & more.keys() if isinstance(table[key], dict)}
    return {**table, **more, **both}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
