"""Turns what is wrong with a configuration into sentences: the key, what was given, what is allowed.

A fault knows which keys it is about, so that what follows from another fault is not reported as well. It does not
find faults.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, cast, final

from pydantic import ValidationError

from evenstep.arguments import meant
from evenstep.config.keys import advice_for, kind_of, locate, meant_by, tables
from evenstep.config.schema import Config
from evenstep.config.section import NAME_OR_TABLE, Section
from evenstep.devices import why_not

Location = tuple[str | int, ...]
"""Where in the configuration pydantic found a fault: keys, numbers of list elements, and the tags of unions."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong.

    Args:
        about: the dotted keys it is about, the first one being where it is.
        meant: the key that a misspelt one was perhaps meant to be.
        text: a sentence that begins with the key.
        missing: whether it is that the key isn't there.
    """

    about: tuple[str, ...]
    text: str
    meant: str | None = None
    missing: bool = False

    def follows_from(self, other: "Fault") -> bool:
        """Whether this is about what `other` is about, a table around or within it, or what that was meant to be."""
        return any(
            mine in (theirs, other.meant) or mine.startswith(f"{theirs}.") or theirs.startswith(f"{mine}.")
            for mine in self.about
            for theirs in other.about
        )


def told(text: str, *also: str) -> Fault:
    """The fault that `text` tells of: about the keys that it names in backticks, and `also`.

    >>> told("`train.updates` and `train.epochs`: one of the two must be given.").about
    ('train.updates', 'train.epochs')
    """
    words: list[str] = re.findall(r"`([^`]+)`", text)
    named = [word for word in words if word.partition(".")[0] in Config.model_fields]
    return Fault(about=tuple(dict.fromkeys((*named, *also))), text=text)


def quoted(value: object) -> str:
    """A value as a user would write it, cut where it is long.

    >>> quoted("x"), quoted(True), quoted([1, "a"]), quoted({"target": "a.py:b"})
    ('"x"', 'true', '[1, "a"]', '{target = "a.py:b"}')
    """
    text = _written(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, cast('Sequence[object]', value)))}]"
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return f"{{{', '.join(f'{name} = {_written(one)}' for name, one in items)}}}"
    return value.isoformat() if isinstance(value, date) else repr(value)


def one_of(options: Sequence[str]) -> str:
    """`one_of(["a", "b"])` is what a sentence says of a choice.

    >>> one_of(["min", "max"])
    '"min" or "max"'
    """
    texts = [f'"{option}"' for option in options]
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]


def did_you_mean(given: object, options: Sequence[str]) -> str:
    """The end of a sentence about a wrong choice: what may have been meant.

    >>> did_you_mean("bf16", ["bf16-mixed", "32-true"])
    '; did you mean "bf16-mixed"?'
    >>> did_you_mean("fp16", ["bf16-mixed", "16-mixed"])
    '; did you mean "16-mixed"?'
    """
    close = meant(str(given), options)
    return f'; did you mean "{close}"?' if close else "."


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
    "model": "a table",
    "model_attributes": "a table",
    "path": "a path",
    "none": "left out",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def allowed(kind: str, context: Mapping[str, Any], message: str, given: object) -> str:
    """What pydantic's error says must be, as the middle of a sentence.

    Args:
        kind: the error's type, such as `greater_than`.
        context: the numbers and choices of the error.
        message: pydantic's own words, for kinds that need none of ours.
    """
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        return f"must be {words} {f'{bound:g}' if isinstance(bound, float) else bound}, but is {quoted(given)}."
    if kind in ("literal_error", "union_tag_invalid", "enum"):
        # pydantic gives the choices as text only: "'min', 'max' or 'median'"
        choices = str(context.get("expected") or context.get("expected_tags"))
        options = [option.strip(" '") for option in choices.replace(" or ", ", ").split(",")]
        given = context.get("tag", given)
        return f"must be {one_of(options)}, but is {quoted(given)}{did_you_mean(given, options)}"
    name = kind.removesuffix("_type").removesuffix("_parsing")
    if name in _TYPES:
        return f"must be {_TYPES[name]}, but is {quoted(given)}."
    if kind == "finite_number":
        return f"must be finite, but is {quoted(given)}."
    if message.startswith("it must "):  # a sentence of ours
        return f"{message.removeprefix('it ')}, but is {quoted(given)}."
    return f"is wrong: {message[:1].lower()}{message[1:]}, but is {quoted(given)}."


_PATTERNS = {
    "target": "must be FILE.py:NAME or package.module:NAME",
    "collate": "must be FILE.py:NAME or package.module:NAME",
    "name": "must begin with a letter or digit and have only letters, digits, `.`, `_` and `-`, being a folder's name",
    "device": "must be auto, cpu, mps, cuda or cuda:N",
}


_TABLE = ("model_type", "model_attributes_type", "dict_type")
_LIST = ("tuple_type", "list_type")


def from_validation(error: ValidationError, origin: Callable[[Sequence[str]], str]) -> list[tuple[Location, Fault]]:
    """The faults that pydantic found, each with pydantic's location of it.

    Args:
        error: of the validation of `Config`.
        origin: what to add about where the value of a key came from.
    """
    found: list[tuple[Location, Fault]] = []
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        path, inside = locate(location)
        key = ".".join(path)
        kind, given, meant = detail["type"], cast("object", detail["input"]), None
        if kind == "extra_forbidden":
            siblings = list(dict.fromkeys(name for table in inside for name in table.model_fields))
            meant = meant_by(path, siblings)
            kinds = [kind for table in inside if (kind := kind_of(table))]
            of_kind = f' of kind "{kinds[0]}"' if kinds else ""
            text = f"is not a key{of_kind}; {advice_for(path, siblings)}"
        elif kind == "missing":
            descriptions = [field.description for table in inside if (field := table.model_fields.get(path[-1]))]
            text = f"is missing; set it: {' '.join(str(descriptions[0]).split())}"
        elif path == ("device",) and (reason := why_not(str(given))):
            text = f"can't be {quoted(given)}: {reason}"
        elif kind == "string_pattern_mismatch" or (
            kind == "string_type" and path[-1] in _PATTERNS and path[1:] != ("name",)
        ):
            text = f"{_PATTERNS[path[-1]]}, but is {quoted(given)}{_named_alone(path, given)}"
        else:
            text = allowed(kind, detail.get("ctx", {}), detail["msg"], given)
            if kind in _TABLE and any(part in NAME_OR_TABLE for part in location):
                text = text.replace("must be a table", "must be a name or a table")
            if kind in (*_TABLE, *_LIST, "string_type"):
                text = text.removesuffix(".") + _what_may_be(path, inside, kind, given)
        text = f"`{key}`{'' if kind == 'missing' else origin(path)} {text}"
        fault = Fault(about=(key,), text=text, meant=meant, missing=kind == "missing")
        found.append((location, fault))
    return found


def _named_alone(path: Sequence[str], given: object) -> str:
    """The end of a sentence about what is to name a Python object, and is something else."""
    named = cast("dict[str, object]", given).get("target") if isinstance(given, dict) else None
    if not isinstance(named, str) or path[-1] == "device":
        return "."
    return f"; write `{'.'.join(path)} = {quoted(named)}`. What has arguments is made by a function of the recipe."


def _what_may_be(path: Sequence[str], inside: Sequence[type[Section]], kind: str, given: object) -> str:
    """The end of a sentence about a value of a wrong kind: what to write in its place, or what the key is."""
    key, fields = ".".join(path), [table.model_fields[path[-1]] for table in inside if path[-1] in table.model_fields]
    annotation: Any = fields[0].annotation if fields else None
    text = given if isinstance(given, str) else ""
    if kind in _LIST and text:
        return f"; write `{key} = [{f'{{target = {quoted(text)}}}' if path[-1] == 'hooks' else quoted(text)}]`."
    if kind in _TABLE and not fields:
        if path[-1] in ("target", "args"):
            outer = ".".join(path[:-1])
            return f", as the keys of `{outer}` are names of your own; write `{outer}.NAME.{path[-1]}`."
        return f"; write `{{target = {quoted(text)}}}`." if text and path[-1].isdigit() else "."
    made = tables(annotation)
    keys = list(dict.fromkeys(name for table in made for name in table.model_fields))
    if kind in _TABLE and keys:
        likely = ("kind", "path", "metric", *(("target",) if ":" in text else ()), "name", "target")
        first = next((name for name in likely if name in keys), "")
        if text and first:
            return f"; write `{key}.{first} = {quoted(text)}`."
        kinds = [str(kind_of(table)) for table in made] if len(made) > 1 else []
        return f"; its kinds are {', '.join(kinds)}." if kinds else f"; its keys are {', '.join(keys)}."
    if not fields or not fields[0].description:
        return "."
    first = " ".join(fields[0].description.split()).partition(". ")[0].removesuffix(".")
    return f"; it is: {first[:1].lower()}{first[1:]}."
