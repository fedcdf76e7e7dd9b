"""Option classes: frozen, checked when they are made, described under each field."""

from dataclasses import Field as DataclassField
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from evenstep.errors import ArgumentError

STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, use_attribute_docstrings=True
)

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(Field, DataclassField))
def option(kind: type[T]) -> type[T]:
    """Make a frozen pydantic dataclass whose constructor raises `ArgumentError` with the name of the field.

    Types and ranges stand in the annotations, the description of a field in the string under it. Put `KW_ONLY` of
    `dataclasses` before the fields that are given by name. A run file is validated as JSON
    (`TypeAdapter.validate_json`): there strict mode takes an object for a nested option and an array for a tuple, and
    all faults come at once.

    >>> from typing import Annotated
    >>> @option
    ... class Clip:
    ...     norm: Annotated[float, Field(gt=0)] = 1.0
    ...     '''Largest 2-norm of a gradient.'''
    >>> Clip(2).norm
    2.0
    >>> Clip(norm=-1.0)
    Traceback (most recent call last):
    ...
    evenstep.errors.ArgumentError: `norm` of Clip: input should be greater than 0, but is -1.0.
    """
    made: Any = pydantic_dataclass(kind, frozen=True, config=STRICT)
    build = made.__init__

    @wraps(build)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            build(self, *args, **kwargs)
        except ValidationError as error:
            raise _first_fault(made, error) from None

    made.__init__ = __init__
    return made


def _first_fault(kind: type[Any], error: ValidationError) -> ArgumentError:
    fault = error.errors(include_url=False)[0]
    location = list(fault["loc"])
    names = [field.name for field in fields(kind) if field.init and not field.kw_only]
    if location and isinstance(location[0], int) and location[0] < len(names):
        location[0] = names[location[0]]
    field = ".".join(map(str, location))
    name = kind.__name__
    if fault["type"] in ("missing", "unexpected_keyword_argument"):
        return ArgumentError(f"`{field}` of {name}: {_lowered(fault['msg'])}.", field=field)
    return ArgumentError(f"`{field}` of {name}: {_lowered(fault['msg'])}, but is {fault['input']!r}.", field=field)


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
