"""The base of all tables of the run file, and the kinds of numbers in them.

A table knows its keys, their types and their documentation; it has no behaviour.
"""

from collections.abc import Callable
from inspect import signature
from typing import Annotated, Any, Literal, Self, Unpack, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError

from evenstep.options import Reset

NAME_OR_TABLE = ("a name", "a table")  # what pydantic puts into a location where a value may be either
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Args = dict[str, Any]
Names = Annotated[tuple[str, ...], Field(strict=False)]
TargetName = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")]


def _count_or_auto(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise PydanticCustomError("count_or_auto", "it must be a whole number of at least 1, or auto")


def _as_tuples(value: object) -> Any:
    if not isinstance(value, list | tuple):
        return value
    several = cast("list[object]", value)
    return tuple(tuple(cast("list[object]", one)) if isinstance(one, list) else one for one in several)


def _count_or_pairs(value: object) -> object:
    if type(value) is int:
        if value < 1:
            raise PydanticKnownError("greater_than_equal", {"ge": 1})
        return value
    if isinstance(value, list | tuple):
        pairs = _as_tuples(cast("object", value))
        if pairs and all(isinstance(one, tuple) and [*map(type, one)] == [int, int] for one in pairs):
            return pairs
    raise PydanticCustomError(
        "count_or_pairs", "it must be a whole number of at least 1, or pairs of them, such as [[1, 64], [1000, 128]]"
    )


CountOrPairs = Annotated[
    int | tuple[tuple[int, int], ...],
    PlainValidator(_count_or_pairs),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


# Not a plain union: pydantic would report a wrong value once for each of its members.
CountOrAuto = Annotated[
    int | Literal["auto"],
    PlainValidator(_count_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]


NumberedFactors = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_as_tuples)]


def _resets(value: object) -> object:
    words = tuple(value.split(",")) if isinstance(value, str) else value
    if isinstance(words, list | tuple) and all(word in _RESETS for word in cast("list[object]", words)):
        return tuple(cast("list[Reset]", words))
    some = {"words": ", ".join(_RESETS)}
    raise PydanticCustomError("resets", "it must be some of {words}, in a list or by commas", some)


_RESETS: tuple[str, ...] = get_args(Reset)
ResetWords = Annotated[
    tuple[Reset, ...],
    PlainValidator(_resets),
    WithJsonSchema({"type": "array", "items": {"enum": list(_RESETS)}}),
]


class Section(BaseModel):
    """A table of the run file: unknown keys fail, nothing is converted, nothing changes later.

    A subclass says what is made of it (`of`): a key that has no default here has that of the argument of its name.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        model_title_generator=lambda table: table.__name__.removesuffix("Table"),
    )

    def __init_subclass__(
        cls, of: Callable[..., object] | tuple[Callable[..., object], ...] = (), **config: Unpack[ConfigDict]
    ) -> None:
        for made in of if isinstance(of, tuple) else (of,):
            for name, argument in signature(made).parameters.items():
                if name in cls.__annotations__ and name not in vars(cls) and argument.default is not argument.empty:
                    setattr(cls, name, argument.default)
        super().__init_subclass__(**config)

    @classmethod
    def empty(cls) -> Self:
        return cls.model_validate({})

    @classmethod
    def model_json_schema(cls, *_: Any, **__: Any) -> dict[str, Any]:
        """The JSON schema, in which tables have names without `Table`."""
        return super().model_json_schema(schema_generator=_Names)


class _Names(GenerateJsonSchema):
    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name).removesuffix("Table")
