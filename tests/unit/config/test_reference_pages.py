"""The pages of the configuration and the command line say what the schema and the parser say."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

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
