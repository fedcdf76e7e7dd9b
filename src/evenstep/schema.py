"""Option classes: frozen, checked when they are made, described under each field.

Constructors, run files, their JSON schema and the reference page read the same annotations, ranges, defaults and texts.
pydantic is imported when the first value is checked, so ranges are written by `annotated_types`.
"""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field as DataclassField
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from inspect import Parameter, cleandoc, getsource, signature
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Any, Never, TypeVar, cast, dataclass_transform, get_type_hints

from annotated_types import Ge, Gt, Interval

from evenstep.errors import ArgumentError
from evenstep.lazy import load

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema

STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False, "arbitrary_types_allowed": True}

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, le=1)]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(DataclassField,))
def option(kind: type[T]) -> type[T]:
    """Make a frozen dataclass whose constructor raises `ArgumentError` with the name of the field.

    Types and ranges stand in the annotations, the description of a field in the string under it. Class variables:
    `may_change` holds the names of fields that a resumed run may have another value of, `not_in_files` those of fields
    for Python only; `takes_more` is True for a table of a run file with further keys.
    """
    made: Any = dataclass(frozen=True)(kind)
    made.__pydantic_config__ = STRICT
    build = made.__init__

    @wraps(build)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            _check(made, self, args, kwargs)
        else:
            build(self)

    made.__init__ = __init__
    return made


def _check(kind: type[Any], made: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from pydantic import ValidationError
    from pydantic_core import ArgsKwargs

    try:
        arguments_of(kind).validator.validate_python(ArgsKwargs(args, kwargs), self_instance=made)
    except ValidationError as error:
        names = [field.name for field in fields(kind) if field.init and not field.kw_only]
        given = dict(zip(names, args, strict=False)) | kwargs
        raise _first_fault(kind, error, given, names) from None


def _first_fault(
    kind: type[Any], error: "ValidationError", given: Mapping[str, object], names: Sequence[str]
) -> ArgumentError:
    fault = error.errors(include_url=False)[0]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ArgumentError):
        return cause
    first, *inner = fault["loc"]
    if isinstance(first, int) and first < len(names):
        first = names[first]
    field = ".".join(map(str, path_of([first, *inner], given, missing="missing" in fault["type"])))
    text = fault["msg"][:1].lower() + fault["msg"][1:]
    given_as = "" if fault["type"] in NO_VALUE else f", but is {fault['input']!r}"
    return ArgumentError(f"`{field}` of {kind.__name__}: {text}{given_as}.", field=field)


NO_VALUE = ("missing", "missing_argument", "missing_keyword_only_argument", "unexpected_keyword_argument")
"""Types of pydantic's errors that are about a name, not a value."""


def path_of(location: Sequence[str | int], given: object, *, missing: bool = False) -> tuple[str | int, ...]:
    """Keys of a location of pydantic's, without the labels that it adds for the members of a union.

    Args:
        given: the validated value, such as nested dicts.
        missing: True if the last key is not in it.
    """
    path: list[str | int] = []
    inside: Any = given
    for place, part in enumerate(location):
        if isinstance(inside, Mapping):
            table = cast("Mapping[object, object]", inside)
            if part in table or (missing and place == len(location) - 1):
                path.append(part)
                inside = table.get(part)
        elif isinstance(inside, list | tuple) and isinstance(part, int):
            path.append(part)
            items = cast("Sequence[object]", inside)
            inside = items[part] if part < len(items) else None  # an item that is missing
    return tuple(path or location[:1])


class Matching:
    """Annotation of a text that fits a regular expression as a whole; `must` says so in words."""

    def __init__(self, pattern: str, must: str) -> None:
        self.pattern = pattern
        self.must = must

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], "CoreSchema"]) -> "CoreSchema":
        from pydantic_core import core_schema

        text = core_schema.str_schema(pattern=f"^(?:{self.pattern})$")
        return core_schema.custom_error_schema(text, "text", custom_error_message=f"input should be {self.must}")


class Instance:
    """Annotation of a field that takes objects of a class, which run files can't hold.

    Args:
        target: the class, as "module:name"; it is imported when an object is checked.
    """

    def __init__(self, target: str) -> None:
        self.target = target

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], "CoreSchema"]) -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.checked)

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        from pydantic_core import PydanticOmit

        raise PydanticOmit

    def checked(self, value: object) -> object:
        if not isinstance(value, load(self.target)):
            _refuse("object", f"an object of the class {self.target.partition(':')[2]}")
        return value


def _refuse(kind: str, expected: str) -> Never:
    from pydantic_core import PydanticCustomError

    raise PydanticCustomError(kind, "input should be {expected}", {"expected": expected})  # type: ignore[arg-type]


class Made(Instance):
    """Annotation of a field that takes an object of a class, or a table of the arguments of its constructor."""

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        return handler(arguments_of(load(self.target)).core_schema)

    def checked(self, value: object) -> object:
        if isinstance(value, Mapping):
            return from_table(load(self.target), cast("Mapping[str, object]", value))
        return super().checked(value)


class OneOf(Instance):
    """Annotation of a field that takes one of several classes: an object, or a table of `kind` and its arguments.

    Args:
        target: the base of the classes.
        kinds: the classes by `kind`, or their "module:name", as "module:name" of a mapping.
        default: the `kind` of a table without one.
        named: True if a text is a `kind` too; it stays a text.
    """

    def __init__(self, target: str, kinds: str, *, default: str | None = None, named: bool = False) -> None:
        super().__init__(target)
        self.kinds = kinds
        self.default = default
        self.named = named

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        several: list[dict[str, Any]] = [{"enum": [*load(self.kinds)]}] if self.named else []
        for name in load(self.kinds):
            table = handler.resolve_ref_schema(handler(arguments_of(self.kind(name)).core_schema))
            required = table.pop("required", [])
            table["properties"] = {"kind": {"const": name}, **table.get("properties", {})}
            table["required"] = required if name == self.default else ["kind", *required]
            several.append(table)
        return {"oneOf": several}

    def kind(self, name: str) -> type:
        kind = load(self.kinds)[name]
        return load(kind) if isinstance(kind, str) else kind

    def checked(self, value: object) -> object:
        kinds: Mapping[str, object] = load(self.kinds)
        if isinstance(value, Mapping):
            table = dict(cast("Mapping[str, object]", value))
            kind = table.pop("kind", self.default)
            if not isinstance(kind, str) or kind not in kinds:
                _refuse("kind", f"one of {', '.join(map(repr, kinds))}")
            return from_table(self.kind(kind), table)
        if self.named and isinstance(value, str):
            if value not in kinds:
                _refuse("kind", f"one of {', '.join(map(repr, kinds))}")
            return value
        return super().checked(value)


def from_table(kind: type[T], table: Mapping[str, object]) -> T:
    """Object of a class, from a table of the arguments of its constructor."""
    made: Any = arguments_of(kind).validate_json(json.dumps(table, default=str))
    if is_dataclass(kind):
        return made
    return kind(**{name: getattr(made, name) for name in made.model_fields_set})


@cache
def arguments_of(kind: type) -> "TypeAdapter[Any]":
    """Schema of the arguments of a constructor; an option class is its own."""
    from pydantic import ConfigDict, Field, TypeAdapter, create_model

    if is_dataclass(kind):
        return TypeAdapter(kind)
    hints = get_type_hints(kind.__init__, include_extras=True)
    arguments: dict[str, Any] = {
        name: (hints.get(name, Any), ... if one.default is Parameter.empty else one.default)
        for name, one in signature(kind).parameters.items()
        if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }
    texts = {name: text for base in reversed(kind.__mro__) for name, text in _written_as_args(base.__doc__).items()}
    described: dict[str, Any] = {
        name: (hint, Field(default, description=texts.get(name))) for name, (hint, default) in arguments.items()
    }
    config = ConfigDict(**cast("Any", STRICT))
    return TypeAdapter(cast("Any", create_model)(kind.__name__, __config__=config, __doc__=kind.__doc__, **described))


def _written_as_args(docstring: str | None) -> dict[str, str]:
    _, _, section = cleandoc(docstring or "").partition("\nArgs:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith("        "):
            texts[name] += f" {line.strip()}"
        elif line.startswith("    "):
            name, _, text = line.strip().partition(": ")
            texts[name] = text
        else:
            break
    return texts


def json_schema(kind: type) -> dict[str, Any]:
    """JSON schema of an option class, with the text under each field as its description."""
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import core_schema

    class Described(GenerateJsonSchema):
        def emit_warning(self, kind: Any, detail: str) -> None:
            pass  # choices that are objects have no place in files

        def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
            made = super().dataclass_schema(schema)
            made["properties"] = _described(schema["cls"], made.get("properties", {}))
            made["description"] = _first_paragraph(made.get("description", ""))
            made["title"] = made["title"].removesuffix("Table")
            if getattr(schema["cls"], "takes_more", False):
                made["additionalProperties"] = True
            return made

        def normalize_name(self, name: str) -> str:
            return super().normalize_name(name).removesuffix("Table")

        def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
            made = super().model_schema(schema)
            made["description"] = _first_paragraph(made.get("description", ""))
            return made

    return arguments_of(kind).json_schema(schema_generator=Described)


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def plain_values(options: object) -> dict[str, object]:
    """Fields of an option class as plain values, which ranks and runs can compare; other objects by their class."""
    found = {one.name: getattr(options, one.name) for one in fields(cast("Any", options))}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **plain_values(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[object]", value)]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def _described(kind: type[Any], properties: dict[str, Any]) -> dict[str, Any]:
    texts = texts_of(kind)
    left_out = getattr(kind, "not_in_files", ())
    found = {name: value for name, value in properties.items() if name not in left_out}
    for name in found.keys() & texts.keys():
        found[name]["description"] = " ".join(texts[name].split())
    for name in found.keys() & set(getattr(kind, "may_change", ())):
        found[name]["mayChange"] = True
    return found


@cache
def texts_of(kind: type) -> dict[str, str]:
    """Description of each field of an option class: the string under it."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            texts |= _written_in(base)
    return texts


def _written_in(kind: type) -> dict[str, str]:
    (written,) = ast.parse(dedent(getsource(kind))).body
    body = cast("ast.ClassDef", written).body
    return {
        one.target.id: cleandoc(text.value.value)
        for one, text in pairwise(body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
