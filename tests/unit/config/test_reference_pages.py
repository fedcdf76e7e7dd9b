"""The pages of the configuration and the command line say what the schema and the parser say."""

from copy import deepcopy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from typer.core import TyperGroup
from typer.main import get_command

from evenstep.cli.app import app
from evenstep.config.keys import schema

_SCRIPT = Path(__file__).parents[3] / "website" / "reference.py"


def _reference() -> Any:
    spec = spec_from_file_location("reference", _SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_that_the_schema_and_the_parser_make() -> None:
    for path, page in _reference().PAGES.items():
        assert path.read_text() == page(), f"{path.name} is out of date; run `python website/reference.py`"


def test_every_key_of_every_table_is_on_the_page_with_a_sentence() -> None:
    page = _reference().configuration()
    whole = schema()
    for table in (whole, *whole["$defs"].values()):
        for key in table["properties"]:
            rows = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
            assert rows, key
            assert all(len(row.replace("\\|", "").split(" | ")[-1]) > len("| a few |") for row in rows), rows


def test_a_key_without_a_sentence_or_another_default_would_change_the_page() -> None:
    reference, whole = _reference(), deepcopy(schema())
    before = reference.configuration(whole)
    whole["$defs"]["Train"]["properties"]["check_loss"]["default"] = False
    assert reference.configuration(whole) != before


def test_every_option_that_the_parser_takes_is_on_the_page() -> None:
    page = _reference().cli()
    for name, command in cast(TyperGroup, get_command(app)).commands.items():
        section = page.split(f"## `evenstep {name}`")[1].split("\n## ")[0]
        for parameter in command.params:
            shown = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
            assert getattr(parameter, "hidden", False) or f"`{shown}" in section, (name, shown)
