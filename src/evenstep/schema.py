"""Option classes: frozen, checked when they are made, described under each field.

Constructors, run files, their JSON schema and the reference page read the same annotations, ranges, defaults and texts.
pydantic is imported when the first value is checked, so ranges are written by `annotated_types`.
"""

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field as DataclassField
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from inspect import Parameter, cleandoc, getsource, signature
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Any, Never, NotRequired, TypeVar, cast, dataclass_transform, get_type_hints

from annotated_types import Ge, Gt, Interval

from evenstep.errors import ArgumentError
from evenstep.lazy import load

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema

STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False, "arbitrary_types_allowed": True}
NO_VALUE = ("missing", "missing_argument", "missing_keyword_only_argument", "unexpected_keyword_argument")
"""Types of pydantic's errors that are about a name, not a value."""

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
    for Python only; `extra` is "allow" for a table of a run file with further keys.
    """
    made: Any = dataclass(frozen=True)(kind)
    made.__pydantic_config__ = STRICT | {"extra": getattr(kind, "extra", "forbid")}
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
    """Annotation of a field that takes objects of the class `target`, "module:name", which run files can't hold."""

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

    def kind(self, name: object) -> type:
        kinds: Mapping[str, Any] = load(self.kinds)
        if not isinstance(name, str) or name not in kinds:
            _refuse("kind", f"one of {', '.join(map(repr, kinds))}")
        return load(kinds[name]) if isinstance(kinds[name], str) else kinds[name]

    def checked(self, value: object) -> object:
        if isinstance(value, Mapping):
            table = dict(cast("Mapping[str, object]", value))
            return from_table(self.kind(table.pop("kind", self.default)), table)
        if self.named and isinstance(value, str):
            self.kind(value)
            return value
        return super().checked(value)


def from_table(kind: type[T], table: Mapping[str, object]) -> T:
    """Object of a class, from a table of the arguments of its constructor."""
    made: Any = arguments_of(kind).validate_json(json.dumps(table, default=str))
    return made if is_dataclass(kind) else cast("Any", kind)(**made)


@cache
def arguments_of(kind: type) -> "TypeAdapter[Any]":
    """Schema of a table of the arguments of a constructor; an option class is its own."""
    from pydantic import TypeAdapter

    if is_dataclass(kind):
        return TypeAdapter(kind)
    texts = {name: text for base in reversed(kind.__mro__) for name, text in _written_as_args(base.__doc__).items()}
    return arguments_table(kind, signature(kind).parameters.values(), texts)


def arguments_table(
    function: Callable[..., Any], parameters: Iterable[Parameter], texts: Mapping[str, str] | None = None
) -> "TypeAdapter[Any]":
    """Schema of a table of some arguments of a function or class, with their texts.

    Annotations that pydantic can't read allow anything; a function that takes any keyword arguments any further keys.
    """
    from pydantic import Field, TypeAdapter
    from typing_extensions import TypedDict

    hints = _hints(function)
    rows: dict[str, Any] = {}
    extra = "forbid"
    for one in parameters:
        if one.kind is one.VAR_KEYWORD:
            extra = "allow"
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            continue
        shown = None if one.default is one.empty else _default(one.default)
        about: Any = Field(description=(texts or {}).get(one.name), json_schema_extra=shown)
        hint: Any = Annotated[_readable(hints.get(one.name, Any)), about]
        rows[one.name] = hint if shown is None else NotRequired[hint]
    table: Any = cast("Any", TypedDict)(getattr(function, "__name__", "Arguments"), rows)
    table.__doc__ = function.__doc__
    table.__pydantic_config__ = STRICT | {"extra": extra}
    return TypeAdapter(table)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function.__init__ if isinstance(function, type) else function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that only a type checker can read say nothing at run time


def _readable(hint: Any) -> Any:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        TypeAdapter(cast("Any", list)[hint], config=cast("Any", STRICT))
    except (PydanticUserError, NameError, TypeError):
        return Any
    return hint


def _default(value: object) -> Callable[[dict[str, Any]], None]:
    def add(schema: dict[str, Any]) -> None:
        from pydantic_core import to_jsonable_python

        schema["default"] = to_jsonable_python(value, fallback=repr)

    return add


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
        def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
            made = super().dataclass_schema(schema)
            made["properties"] = _described(schema["cls"], made.get("properties", {}))
            made["description"] = _first_paragraph(made.get("description", ""))
            return made

        def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> dict[str, Any]:
            made = super().typed_dict_schema(schema)
            made["description"] = _first_paragraph(made.get("description", ""))
            return made

    return arguments_of(kind).json_schema(schema_generator=Described)


def _described(kind: type[Any], properties: dict[str, Any]) -> dict[str, Any]:
    texts = {name: text for base in reversed(kind.__mro__) if is_dataclass(base) for name, text in _written_in(base)}
    left_out = getattr(kind, "not_in_files", ())
    found = {name: value for name, value in properties.items() if name not in left_out}
    for name, value in found.items():
        if name in texts:
            value["description"] = " ".join(texts[name].split())
        if name in getattr(kind, "may_change", ()):
            value["mayChange"] = True
    return found


def _written_in(kind: type) -> list[tuple[str, str]]:
    (written,) = ast.parse(dedent(getsource(kind))).body
    return [
        (one.target.id, text.value.value)
        for one, text in pairwise(cast("ast.ClassDef", written).body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def plain_values(options: object) -> dict[str, object]:
    """Fields of an option class as plain values, which ranks and runs can compare; other objects by their class."""
    return {one.name: _plain(getattr(options, one.name)) for one in fields(cast("Any", options))}


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **plain_values(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[object]", value)]
    return value if isinstance(value, int | float | str | None) else type(value).__name__
