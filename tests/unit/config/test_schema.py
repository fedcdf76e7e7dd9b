"""Option classes: what their constructors, run files and the JSON schema make of their annotations."""

import dataclasses
import inspect
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from annotated_types import Interval

import evenstep
from evenstep.config.load import schema
from evenstep.config.run import DataTable, ParallelTable
from evenstep.errors import ArgumentError
from evenstep.options import Training
from evenstep.schema import Count, Instance, json_schema, option
from refused import refused


@option
class Inner:
    size: Count = 1
    """Number of things."""


@option
class Outer:
    """A table.

    More about it.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"share"})
    not_in_files: ClassVar[frozenset[str]] = frozenset({"kept"})

    name: str
    share: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    """Share of the
    whole."""
    inner: Inner = Inner()
    kept: bool = False


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": 3}, "name"),
        ({"name": "a", "share": 1.0}, "share"),
        ({"name": "a", "share": float("nan")}, "share"),
        ({"name": "a", "shares": 0.5}, "shares"),
        ({"share": 0.5}, "name"),
        ({"name": "a", "inner": {"size": 0}}, "inner"),
    ],
)
def test_a_wrong_option_is_an_error_with_its_field(given: dict[str, Any], field: str) -> None:
    with refused(ArgumentError, field):
        Outer(**given)


def test_the_schema_has_texts_ranges_and_what_may_change() -> None:
    found = json_schema(Outer)
    assert found["description"] == "A table."
    assert list(found["properties"]) == ["name", "share", "inner"]
    share = found["properties"]["share"]
    assert share["description"] == "Share of the whole."
    assert (share["minimum"], share["exclusiveMaximum"], share["mayChange"]) == (0, 1, True)
    assert found["$defs"]["Inner"]["properties"]["size"]["minimum"] == 1


def test_objects_and_tables_of_their_arguments_are_taken() -> None:
    @option
    class Holder:
        budget: Annotated[Any, Instance("evenstep.events:TimeBudget", made=True)] = None
        hook: Annotated[Any, Instance("evenstep.events:Hook")] = None

    assert isinstance(Holder(budget={"max_minutes": 3.0}).budget, evenstep.TimeBudget)
    assert isinstance(Holder(hook=evenstep.Timer()).hook, evenstep.Timer)
    with refused(ArgumentError, "budget.max_minutes"):
        Holder(budget={"max_minutes": "x"})
    with refused(ArgumentError, "hook"):
        Holder(hook={})
    assert "hook" not in json_schema(Holder)["properties"]


def test_a_kind_chooses_the_class_of_a_table() -> None:
    made = Training(combine={"kind": "grad_norm", "alpha": 0.5})  # type: ignore[arg-type]
    assert type(made.combine).__name__ == "GradNorm"
    with refused(ArgumentError, "combine.alpha"):
        Training(combine={"kind": "grad_norm", "alpha": -1})  # type: ignore[arg-type]
    with refused(ArgumentError, "combine"):
        Training(combine="pc_grd")


def test_every_key_of_run_files_is_described() -> None:
    def undescribed(node: Any, path: str) -> list[str]:
        if isinstance(node, list):
            return [one for inner in node for one in undescribed(inner, path)]
        if not isinstance(node, dict):
            return []
        found = [
            f"{path}.{name}"
            for name, value in node.get("properties", {}).items()
            if name != "kind" and not value.get("description")
        ]
        return found + [one for name, inner in node.items() for one in undescribed(inner, f"{path}.{name}")]

    assert undescribed(schema(), "") == []
    assert json.loads(json.dumps(schema())) == schema()


@pytest.mark.parametrize(
    ("table", "constructor"),
    [
        (DataTable, evenstep.MapData),
        (DataTable, evenstep.StreamData),
        (ParallelTable, evenstep.parallel.Fsdp),
        (ParallelTable, evenstep.parallel.Processes),
    ],
    ids=lambda one: one.__name__,
)
def test_a_table_has_the_defaults_of_what_is_made_of_it(table: Any, constructor: Any) -> None:
    arguments = inspect.signature(constructor).parameters
    there = {name: one.default for name, one in arguments.items() if one.default is not one.empty}
    here = {one.name: one.default for one in dataclasses.fields(table) if one.default is not dataclasses.MISSING}
    common = (there.keys() & here.keys()) - {"collate"}
    assert common
    assert {name: here[name] for name in common} == {name: there[name] for name in common}


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
