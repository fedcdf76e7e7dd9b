"""Checks the arguments of a target against its signature, before anything is called.

Where an annotation is of a plain type the argument is checked and converted: a list to a tuple, text to a `Path`, a
table to a dataclass. Annotations of other types, such as a tensor's, are left to the target.
"""

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, final

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from evenstep.arguments import advice
from evenstep.config.faults import allowed


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
) -> tuple[Call, list[str]]:
    """Check `args` against the signature of `function`, and convert them.

    Args:
        key: of the target; the arguments are `KEY.args.NAME`.
        folder: what a relative `Path` is relative to.
        num_given: positional arguments that the engine gives.
        named: keyword arguments that the engine gives, and the key that each is the value of.
    """
    named = named or {}
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in classes don't have one
        return Call(key=key, function=function, arguments=args), []
    parameters = {
        name: parameter
        for name, parameter in list(signature.parameters.items())[num_given:]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    called = f"`{getattr(function, '__name__', type(function).__name__)}`"
    faults: list[str] = []
    converted: dict[str, object] = {}
    hints = _hints(function)
    for name, value in args.items():
        where = f"{key}.args.{name}"
        if name in named:
            faults.append(f"`{where}` is given by `{named[name]}` already; leave it out.")
        elif name not in parameters and not takes_any:
            options = [other for other in parameters if other not in named]
            faults.append(f"`{where}` is not an argument of {called}; {advice(name, options)}")
        else:
            converted[name], fault = _convert(value, hints.get(name, Any), folder)
            faults += [f"`{where}` {fault}"] if fault else []
    for name, source in named.items():
        if name not in parameters and not takes_any:
            faults.append(f"`{key}` needs `{source}`, but {called} takes no `{name}`.")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in args and name not in named:
            faults.append(f"`{key}.args.{name}` is missing; {called} can't be called without it.")
    return Call(key=key, function=function, arguments=converted), faults


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that only a type checker can read say nothing at run time


def _convert(value: object, hint: Any, folder: Path) -> tuple[object, str]:
    try:
        # strict JSON is what TOML values are: no text to numbers, but lists to tuples, text to paths and enums
        given = json.dumps(value, default=lambda other: other.isoformat())
        result = TypeAdapter(_plain(hint)).validate_json(given, strict=True, extra="forbid")
    except ValidationError as error:
        texts = [allowed(one) for one in error.errors(include_url=False)]
        *others, last = dict.fromkeys(texts)  # one for each member of a union
        return value, " or ".join([*(text.partition(", but is ")[0] for text in others), last])
    except (PydanticUserError, NameError):
        return value, ""  # an annotation that is no plain type, such as a tensor
    if isinstance(result, Path):
        return (folder / result.expanduser()).resolve(), ""
    return result if hint is not Any else value, ""


def _plain(hint: Any) -> Any:
    kind: Any = typing.get_origin(hint)
    members: tuple[Any, ...] = typing.get_args(hint)
    if kind in (Union, UnionType):
        plain = tuple(_plain(member) for member in members if getattr(member, "__name__", "") != "Tensor")
        return Union[plain] if plain else hint  # noqa: UP007 - they are only known here
    if kind in (tuple, list):
        return cast("Any", kind)[tuple(map(_plain, members))]
    return hint
