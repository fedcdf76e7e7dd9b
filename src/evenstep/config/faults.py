"""Turns what is wrong with a configuration into sentences: the key, what was given, what is allowed.

A fault knows which keys it is about, so that what follows from another fault is not reported as well. It does not
find faults.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple, cast

from evenstep.arguments import meant, shortened
from evenstep.config.schema import Config


class Fault(NamedTuple):
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
    return shortened(_written(value))


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


LISTS = ("tuple_type", "list_type")
"""What pydantic calls the fault of a value that must be a list."""


def listed(text: str) -> str:
    """The list that text with commas was perhaps meant to be.

    >>> listed("0.9,0.95"), listed("console, csv"), listed("[a]")
    ('[0.9, 0.95]', '["console", "csv"]', '["a"]')
    """
    parts = [part.strip() for part in text.strip("[]").split(",")]
    return f"[{', '.join(part if re.fullmatch(_NUMBER, part) else quoted(part) for part in parts)}]"


_NUMBER = r"[+-]?(\d+(\.\d+)?([eE][+-]?\d+)?)"


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
