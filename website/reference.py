"""Writes docs/reference/configuration.md from the schema of run files, and cli.md from the commands' own descriptions.

python website/reference.py           writes the pages
python website/reference.py --check   exits 1 if a page is not what would be written
"""

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from typer.core import TyperGroup
from typer.main import get_command

from evenstep.cli.app import app
from evenstep.cli.arguments import WithSettings
from evenstep.config.load import schema

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_MADE_BY = "<!-- Made by `python website/reference.py`; a test compares them. -->"
_CONFIGURATION = f"""# Configuration

{_MADE_BY}

Every key of a run file with its type, default and meaning. Another key is an error that suggests the closest one. On
the command line a key is `--section.key value`: `evenstep train run.toml --train.updates 500`; the value `none` unsets
it. `evenstep check run.toml` finds all faults of a run file at once. `evenstep config-schema` prints this page as a
JSON schema, for editors.
"""
_CLI = f"""# Command line

{_MADE_BY}

    evenstep COMMAND [argument] [--option value] [--section.key value]

`evenstep COMMAND --help` says the same. Every command takes `--traceback`, which shows where an error was raised; what
`--section.key` may be is in [Configuration](configuration.md).

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an error, which is said in a paragraph |
| 2 | a configuration or a command line that can't be |
| 75 | stopped from outside and saved: run it again with `evenstep resume` |
| 130 | Ctrl-C; what was trained is saved |
"""


def configuration(whole: Mapping[str, Any] | None = None) -> str:
    """The page of the run file's keys: a section for each table, at the first path where it may stand."""
    return _CONFIGURATION + "".join(_sections(whole or schema()))


class _Section(NamedTuple):
    title: str
    kind: str | None
    about: str
    rows: list[str]


def _sections(whole: Mapping[str, Any]) -> Iterator[str]:
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", whole)]
    homes: dict[str, str] = {}
    found: list[_Section] = []
    while waiting:
        path, table = waiting.pop(0)
        below: list[tuple[str, Mapping[str, Any]]] = []
        rows: list[str] = []
        for key, value in table["properties"].items():
            inner = f"{path}.{key}".strip(".")
            within = list(_tables_in(value, inner, whole["$defs"]))
            for one, where in within:
                if one["title"] not in homes:
                    homes[one["title"]] = where
                    below.append((where, one))
            if key != "kind" or "const" not in value:
                rows.append(_row(key, value, key in table.get("required", ()), within, homes))
        waiting[:0] = below
        title = "At the top" if not path else f"`[{path}]`" if path[0] != "[" else f"`{path}`"
        kind = table["properties"].get("kind", {}).get("const")
        found.append(_Section(title, kind, " ".join(table["description"].split()), rows))
    for title, sections in itertools.groupby(found, key=lambda section: section.title):
        yield _written(title, list(sections))


def _written(title: str, sections: list[_Section]) -> str:
    """One table of keys, also where a table of the run file has several kinds: a key names the kinds that have it."""
    if sections[0].kind is None:
        (section,) = sections
        rows = "\n".join(f"| {row} |" for row in section.rows)
        return f"\n## {title}\n\n{section.about}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n"
    kinds = "\n".join(f"| `{section.kind}` | {section.about} |" for section in sections)
    rows: dict[str, list[str]] = {}
    for section in sections:
        for row in section.rows:
            rows.setdefault(row, []).append(f"`{section.kind}`")
    keys = "\n".join(
        f"| {row} | {'all' if len(names) == len(sections) else ', '.join(names)} |" for row, names in rows.items()
    )
    table = f"\n| key | type | default | meaning | kinds |\n|---|---|---|---|---|\n{keys}\n" if keys else ""
    return f"\n## {title}\n\n| kind | meaning |\n|---|---|\n{kinds}\n{table}"


def _row(
    key: str,
    value: Mapping[str, Any],
    required: bool,
    within: Sequence[tuple[Mapping[str, Any], str]],
    homes: Mapping[str, str],
) -> str:
    said = value.get("description") or (within[0][0]["description"] if within else "")
    if within and homes[within[0][0]["title"]] != within[0][1]:
        said = f"{said} Its keys are those of `[{homes[within[0][0]['title']].strip('[]')}]`."
    default = "*required*" if required else _default(value, bool(within))
    cells = [f"`{key}`", _type(value), default, " ".join(said.split())]
    return " | ".join(cell.replace("|", chr(92) + "|") for cell in cells)


def _tables_in(
    value: Mapping[str, Any], path: str, tables: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Tables that a value may be or hold, and the paths where they stand."""
    if "$ref" in value:
        yield tables[value["$ref"].rpartition("/")[2]], path
    if "properties" in value:
        yield value, path
    for one in (*value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from _tables_in(one, path, tables)
    if isinstance(value.get("items"), dict):
        yield from _tables_in(value["items"], f"[[{path}]]", tables)
    if isinstance(value.get("additionalProperties"), dict):
        yield from _tables_in(value["additionalProperties"], f"{path}.NAME", tables)


def _type(value: Mapping[str, Any]) -> str:
    if "$ref" in value or "properties" in value:
        return "table"
    if "anyOf" in value or "oneOf" in value:
        several = value.get("anyOf", value.get("oneOf"))
        return " or ".join(dict.fromkeys(_type(one) for one in several if one.get("type") != "null"))
    if "const" in value or "enum" in value:
        return ", ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
    match value["type"]:
        case "array" if "prefixItems" in value:
            return f"pair of {' and '.join(map(_type, value['prefixItems']))}"
        case "array":
            return f"list of {'tables' if '$ref' in value['items'] else _type(value['items'])}"
        case "object":
            inner = value.get("additionalProperties")
            return "tables by name" if isinstance(inner, dict) and _type(inner) == "table" else "table of your own keys"
        case "integer" | "number":
            return {"integer": "whole number", "number": "number"}[value["type"]] + _bounds(value)
        case kind:
            return {"string": "text", "boolean": "`true`, `false`"}[kind]


def _bounds(value: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    largest = 2**53  # what says no more than that a seed is a number of 64 bits
    bounds = [f"{sign} {value[name]:g}" for name, sign in signs.items() if abs(value.get(name, largest)) < largest]
    return f" {', '.join(bounds)}" if bounds else ""


def _default(value: Mapping[str, Any], holds_tables: bool) -> str:
    default = value.get("default", value.get("const"))
    if default is None or default == {} or (holds_tables and default == []):
        return "–"
    if isinstance(default, dict):
        return "its keys' own"
    if isinstance(default, str) or type(default) in (bool, list):
        return f"`{json.dumps(default)}`"
    return f"`{default!r}`"


def cli() -> str:
    """The page of commands, arguments and options."""
    group = cast(TyperGroup, get_command(app))
    return _CLI + "".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    """The section of one command, from its Typer parameters."""
    usage = f"    evenstep {name}"
    rows: list[str] = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            shown = parameter.metavar
            usage += f" {shown}" if parameter.required else f" [{shown}]"
        else:
            shown = f"{parameter.opts[0]} {'' if parameter.is_flag else parameter.metavar}".strip()
        has_default = not parameter.required and parameter.default not in (None, False, "")
        default = f" Default: {parameter.default}." if has_default else ""
        rows.append(f"| `{shown}` | {parameter.help}{default} |")
    if any(parameter.param_type_name == "option" for parameter in command.params):
        usage += " [--option value …]"
    if isinstance(command, WithSettings):
        usage += " [--section.key value …]"
        key, _, meaning = (command.epilog or "").partition(": ")
        rows.append(f"| `{key}` | {meaning[0].upper()}{meaning[1:]} |")
    table = "\n| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    text = " ".join((command.help or "").split())
    return f"\n## `evenstep {name}`\n\n{text}\n\n{usage}\n{table}"


PAGES = {FOLDER / "configuration.md": configuration, FOLDER / "cli.md": cli}


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    if arguments == ["--check"]:
        return int(any(path.read_text() != page() for path, page in PAGES.items()))
    for path, page in PAGES.items():
        path.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
