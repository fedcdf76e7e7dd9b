"""Checks the arguments of a target against its signature, before anything is called.

Where an annotation is of a plain type the argument is checked and converted: a list to a tuple, text to a `Path`, a
table to a dataclass. Annotations of other types, such as a tensor's, are left to the target.
"""

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, final

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from evenstep.arguments import advice
from evenstep.config.faults import LISTS, Fault, allowed, listed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A target with its arguments, ready to be called.

    Args:
        key: where it stands in the run file.
        arguments: by name, converted to what the signature asks for.
    """

    key: str
    function: Callable[..., Any]
    arguments: Mapping[str, object]

    def __call__(self, *given: object, **more: object) -> Any:
        """Call it; `given` comes first and `more` last."""
        return self.function(*given, **self.arguments, **more)


def bind(
    key: str,
    function: Callable[..., Any],
    args: Mapping[str, Any],
    folder: Path,
    *,
    num_given: int = 0,
    named: Mapping[str, str] | None = None,
) -> tuple[Call, list[Fault]]:
    """Check `args` against the signature of `function`, and convert them.

    Args:
        key: of the target; the arguments are `KEY.args.NAME`.
        folder: what a relative `Path` is relative to.
        num_given: positional arguments that the engine gives.
        named: keyword arguments that the engine gives, and the key that each is the value of.
    """
    named = named or {}
    call = Call(key=key, function=function, arguments=args)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in classes don't have one
        return call, []
    parameters = {
        name: parameter
        for name, parameter in list(signature.parameters.items())[num_given:]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    faults: list[Fault] = []
    converted: dict[str, object] = {}
    hints = _hints(function)
    for name, value in args.items():
        where = f"{key}.args.{name}"
        if name in named:
            faults.append(Fault(about=(where,), text=f"`{where}` is given by `{named[name]}` already; leave it out."))
        elif name not in parameters and not takes_any:
            faults.append(_unknown(where, name, function, [other for other in parameters if other not in named]))
        else:
            converted[name], wrong = _convert(where, value, hints.get(name, Any), folder)
            faults += wrong
    for name, source in named.items():
        if name not in parameters and not takes_any:
            faults.append(
                Fault(about=(key, source), text=f"`{key}` needs `{source}`, but {_name(function)} takes no `{name}`.")
            )
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in args and name not in named:
            where = f"{key}.args.{name}"
            faults.append(
                Fault(about=(where,), text=f"`{where}` is missing; {_name(function)} can't be called without it.")
            )
    return Call(key=key, function=function, arguments=converted), faults


def _unknown(where: str, name: str, function: Callable[..., Any], options: list[str]) -> Fault:
    close = get_close_matches(name, options, n=1)
    if close:
        meant = where.removesuffix(name) + close[0]
        return Fault(
            about=(where, meant),
            text=f"`{where}` is not an argument of {_name(function)}; did you mean `{meant}`?",
        )
    takes = f"it takes {', '.join(options)}." if options else "it takes none."
    return Fault(about=(where,), text=f"`{where}` is not an argument of {_name(function)}; {takes}")


def _name(function: Callable[..., Any]) -> str:
    return f"`{getattr(function, '__name__', type(function).__name__)}`"


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that only a type checker can read say nothing at run time


def _convert(where: str, value: object, hint: Any, folder: Path) -> tuple[object, list[Fault]]:
    try:
        # strict JSON is what TOML values are: no text to numbers, but lists to tuples, text to paths and enums
        given = json.dumps(value, default=lambda other: other.isoformat())
        result = TypeAdapter(_plain(hint)).validate_json(given, strict=True, extra="forbid")
    except ValidationError as error:
        return value, list(_type_faults(where, value, hint, error))
    except (PydanticUserError, NameError):
        return value, []  # an annotation that is no plain type, such as a tensor
    if isinstance(result, Path):
        return (folder / result.expanduser()).resolve(), []
    return result if hint is not Any else value, []


def _plain(hint: Any) -> Any:
    """`hint` without tensors where something else may be given as well, as no value of a run file is a tensor."""
    kind: Any = typing.get_origin(hint)
    members: tuple[Any, ...] = typing.get_args(hint)
    if kind in (Union, UnionType):
        plain = tuple(_plain(member) for member in members if not _is_tensor(member))
        return Union[plain] if plain else hint  # noqa: UP007 - they are only known here
    if kind in (tuple, list):
        return cast("Any", kind)[tuple(map(_plain, members))]
    return hint


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, type) and (kind.__module__, kind.__name__) == ("torch", "Tensor")


def _type_faults(where: str, value: object, hint: Any, error: ValidationError) -> Iterator[Fault]:
    """One fault for each place in `value`; what the members of a union want is joined by "or"."""
    wanted: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        kind, given = detail["type"], cast("object", detail["input"])
        inner = _inner(value, detail["loc"], goes_beyond=kind in (*_UNKNOWN, "missing", "missing_argument"))
        if kind in _UNKNOWN:
            tables = [table for table in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(table)]
            names = [field.name for table in tables for field in dataclasses.fields(table)]
            text = f"is not known; {advice(inner[-1], names, 'leave it out.')}"
        elif kind in ("missing", "missing_argument"):
            text = "is missing; set it."
        else:
            text = allowed(kind, detail.get("ctx", {}), detail["msg"], given)
            if kind in LISTS and isinstance(given, str) and "," in given:
                text = f"{text.removesuffix('.')}; write `{listed(given)}`."
        wanted.setdefault(".".join([where, *inner]), []).append(text)
    for key, texts in wanted.items():
        *others, last = dict.fromkeys(texts)
        joined = [text.partition(", but is ")[0] for text in others] + [
            last.removeprefix("must be ") if others else last
        ]
        yield Fault(about=(key,), text=f"`{key}` {' or '.join(joined)}")


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _inner(value: object, place: tuple[str | int, ...], *, goes_beyond: bool) -> list[str]:
    """The keys of `place` that lead into `value`; pydantic also names there which member of a union it tried."""
    path: list[str] = []
    for position, part in enumerate(place):
        last = goes_beyond and position == len(place) - 1
        if isinstance(value, dict) and (part in value or last):
            value = cast("dict[Any, Any]", value).get(part)
        elif isinstance(value, list) and isinstance(part, int):
            items = cast("list[Any]", value)
            value = items[part] if part < len(items) else None  # a tuple of so many asks for more
        else:
            continue
        path.append(str(part))
    return path
