"""Option classes: frozen, checked when they are made, described under each field.

Constructors, run files, their JSON schema and the reference page read the same annotations, ranges, defaults and texts.
pydantic is imported when the first value is checked, so ranges are written by `annotated_types`.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache, wraps
from inspect import Parameter, cleandoc, getsource, signature
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Any, Never, NotRequired, TypeVar, cast, dataclass_transform, get_type_hints

from annotated_types import Ge, Gt, Interval

from evenstep.arguments import advice, meant
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
Path = tuple[str, ...]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def option(kind: type[T]) -> type[T]:
    """Make a frozen dataclass of keyword arguments, whose constructor raises `ArgumentError` with the field's name.

    Types and ranges stand in the annotations, the description of a field in the string under it. Class variables:
    `may_change` holds the names of fields that a resumed run may have another value of, `not_in_files` those of fields
    for Python only; `extra` is "allow" for a table of a run file with further keys.
    """
    made: Any = dataclass(frozen=True, kw_only=True)(kind)
    made.__pydantic_config__ = STRICT | {"extra": getattr(kind, "extra", "forbid")}
    build = made.__init__

    @wraps(build)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        if args or not kwargs:
            build(self, *args)  # Python refuses positional arguments
            return
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        try:
            arguments_of(made).validator.validate_python(ArgsKwargs((), kwargs), self_instance=self)
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            if isinstance(cause, ArgumentError):
                raise cause from None
            known = signature(build).parameters
            (path, text), *_ = faults_of(error, kwargs, lambda path: advice(path[-1], known)).items()
            field = ".".join(path)
            raise ArgumentError(f"`{field}` of {made.__name__} {text}", field=field) from None

    made.__init__ = __init__
    return made


def faults_of(error: "ValidationError", given: object, advise: Callable[[Path], str]) -> dict[Path, str]:
    """The end of a sentence on each wrong value, by its path: allowed values, given value, closest name.

    Args:
        given: the validated value, such as nested tables.
        advise: end of a sentence on the path of an unknown name.
    """
    texts: dict[Path, list[str]] = {}
    ends: dict[Path, str] = {}
    for fault in error.errors(include_url=False):
        kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
        path = _path_of(fault["loc"], given, missing="missing" in kind)
        cause = context.get("error")
        if isinstance(cause, ArgumentError) and cause.field:
            path += (cause.field,)
        if kind == "kind" and isinstance(value, dict):
            path += ("kind",)
            value = cast("dict[str, object]", value).get("kind", "")
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            text, end = "is unknown", f"; {advise(path)}"
        elif "missing" in kind:
            text, end = "is missing", "; set it."
        elif isinstance(cause, ArgumentError):
            text = str(cause).rstrip(".")
            end = "" if text.endswith("?") else "."
        else:
            close = meant(str(value), re.findall(r"'([^']+)'", str(context.get("expected", ""))))
            text = (fault["msg"][:1].lower() + fault["msg"][1:]).removeprefix("input ")
            end = f", but is {quoted(value)}" + (f'; did you mean "{close}"?' if close else ".")
        if kind not in ("object", "needs_python_object") or path not in texts:  # a file can't hold objects
            texts.setdefault(path, []).append(text)
            ends.setdefault(path, end)
    tables = {path[:length] for path in texts for length in range(len(path))}  # of which the members are at fault
    return {path: " or ".join(dict.fromkeys(those)) + ends[path] for path, those in texts.items() if path not in tables}


def _path_of(location: Sequence[str | int], given: Any, *, missing: bool) -> Path:
    path: list[str | int] = []
    for part in location:
        try:
            given = given[part]
        except (KeyError, IndexError, TypeError):  # a label that pydantic adds for the member of a union
            continue
        path.append(part)
    if missing:
        path.append(location[-1])
    return tuple(map(str, path or location[:1]))


def quoted(value: object) -> str:
    """A value as a user would write it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    """Annotation of a field that takes objects of the class `target`, "module:name".

    Run files can't hold them, unless with `made` the field takes a table of the arguments of the constructor as well.
    """

    def __init__(self, target: str, *, made: bool = False) -> None:
        self.target = target
        self.made = made

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], "CoreSchema"]) -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.checked)

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        from pydantic_core import PydanticOmit

        if not self.made:
            raise PydanticOmit
        return handler(arguments_of(load(self.target)).core_schema)

    def checked(self, value: object) -> object:
        if self.made and isinstance(value, Mapping):
            return _from_table(load(self.target), cast("Mapping[str, object]", value))
        if not isinstance(value, load(self.target)):
            _refuse("object", f"an object of the class {self.target.partition(':')[2]}")
        return value


def _refuse(kind: str, expected: str) -> Never:
    from pydantic_core import PydanticCustomError

    raise PydanticCustomError(kind, "input should be {expected}", {"expected": expected})  # type: ignore[arg-type]


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
            return _from_table(self.kind(table.pop("kind", self.default)), table)
        if self.named and isinstance(value, str):
            self.kind(value)
            return value
        return super().checked(value)


def _from_table(kind: type, table: Mapping[str, object]) -> object:
    made: Any = arguments_of(kind).validate_json(json.dumps(table, default=str))
    return made if is_dataclass(kind) else cast("Any", kind)(**made)


@cache
def arguments_of(kind: type) -> "TypeAdapter[Any]":
    """Schema of a table of the arguments of a constructor; an option class is its own."""
    from pydantic import TypeAdapter

    if is_dataclass(kind):
        return TypeAdapter(kind)
    texts = {name: text for base in reversed(kind.__mro__) for name, text in _written_as_args(base.__doc__).items()}
    return arguments_table(kind, [*signature(kind).parameters.values()], texts)


def arguments_table(
    function: Callable[..., Any], parameters: Sequence[Parameter], texts: Mapping[str, str] | None = None
) -> "TypeAdapter[Any]":
    """Schema of a table of some arguments of a function or class, with their texts.

    A function with annotations that pydantic can't read takes any values; one with `**more` any further keys.
    """
    from pydantic import Field, TypeAdapter
    from pydantic.errors import PydanticUserError
    from pydantic_core import to_jsonable_python
    from typing_extensions import TypedDict

    extra = "allow" if any(one.kind is one.VAR_KEYWORD for one in parameters) else "forbid"

    def table(hints: Mapping[str, Any]) -> "TypeAdapter[Any]":
        rows: dict[str, Any] = {}
        for one in parameters:
            if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                continue
            is_needed = one.default is one.empty
            shown = None if is_needed else {"default": to_jsonable_python(one.default, fallback=repr)}
            about: Any = Field(description=(texts or {}).get(one.name), json_schema_extra=shown)
            hint: Any = Annotated[hints.get(one.name, Any), about]
            rows[one.name] = hint if is_needed else NotRequired[hint]
        made: Any = cast("Any", TypedDict)(getattr(function, "__name__", "Arguments"), rows)
        made.__doc__ = function.__doc__
        made.__pydantic_config__ = STRICT | {"extra": extra}
        return TypeAdapter(made)

    annotated = function.__init__ if isinstance(function, type) else function
    try:
        return table(get_type_hints(annotated, include_extras=True))
    except (PydanticUserError, NameError, TypeError, AttributeError):
        return table({})


def _written_as_args(docstring: str | None) -> dict[str, str]:
    section = cleandoc(docstring or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def json_schema(kind: type) -> dict[str, Any]:
    """JSON schema of an option class, with the text under each field as its description."""
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import core_schema

    class Described(GenerateJsonSchema):
        def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
            made = super().dataclass_schema(schema)
            made["properties"] = _described(schema["cls"], made.get("properties", {}))
            return _briefly(made)

        def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> dict[str, Any]:
            return _briefly(super().typed_dict_schema(schema))

    return arguments_of(kind).json_schema(schema_generator=Described)


def _briefly(table: dict[str, Any]) -> dict[str, Any]:
    first, _, _ = table.get("description", "").partition("\n\n")
    return table | {"description": " ".join(first.split())}


def _described(kind: type[Any], properties: dict[str, Any]) -> dict[str, Any]:
    texts = {name: text for base in reversed(kind.__mro__) if is_dataclass(base) for name, text in _written_in(base)}
    left_out = getattr(kind, "not_in_files", ())
    found = {name: value for name, value in properties.items() if name not in left_out}
    for name, value in found.items():
        if name in texts:
            value["description"] = texts[name]
        if name in getattr(kind, "may_change", ()):
            value["mayChange"] = True
    return found


def _written_in(kind: type) -> list[tuple[str, str]]:
    (written,) = ast.parse(dedent(getsource(kind))).body
    return [
        (ast.unparse(field.target), " ".join(str(text.value.value).split()))
        for field, text in pairwise(cast("ast.ClassDef", written).body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    ]
