"""Checks of arguments, and words for messages. Importing this loads no torch."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from evenstep.errors import ArgumentError
from evenstep.usual_words import ARGUMENTS, VALUES

T = TypeVar("T")


def require_whole(name: str, value: object, *, at_least: int = 1) -> int:
    """`value`, perhaps a number of numpy's, as an int; ArgumentError unless it is in range."""
    whole = not isinstance(value, bool) and hasattr(value, "__index__")
    number = cast(Any, value).__index__() if whole else at_least - 1
    if number < at_least:
        text = f"`{name}` must be a whole number of at least {at_least}, but is {said(value)}."
        raise ArgumentError(text, field=name)
    return number


def check_one_of_two(first: str, second: str, one: object, other: object) -> None:
    """Raise ArgumentError unless one of two arguments is given, the other None."""
    if (one is None) == (other is None):
        raise ArgumentError(f"`{first}` or `{second}`: give one of the two.", field=first)


def choose(argument: str, word: str, table: Mapping[str, T]) -> T:
    """Value of `word` in `table`; ArgumentError with the closest word.

    >>> choose("precision", "bf16-true", {"bf16-mixed": 1, "bf16-true": 2})
    2
    """
    if word in table:
        return table[word]
    close = meant(word, table)
    end = f"; is it {close!r}?" if close else "."
    raise ArgumentError(f"`{argument}` must be one of {', '.join(table)}, but is {word!r}{end}", field=argument)


def meant(word: str, known: Collection[str]) -> str:
    """Closest of the known words; "" for none.

    >>> meant("fp16", ["bf16-mixed", "16-mixed"]), meant("reduce_lr_on_plateau", ["linear", "plateau"])
    ('16-mixed', 'plateau')
    """
    usual = [VALUES[word.lower()]] if VALUES.get(word.lower()) in known else []
    begins = [name for name in known if word and name.startswith(word)]
    inside = [name for name in known if len(name) > 2 and name in word]
    close = usual or begins or get_close_matches(word, known, n=1) or inside
    return close[0] if close else ""


def advice(word: str, known: Collection[str], otherwise: str = "") -> str:
    """End of a sentence about a word that is none of `known`: the closest, else `otherwise`."""
    close = meant(word, known)
    return f"did you mean `{close}`?" if close else otherwise or f"there are {', '.join(known) or 'none'}."


def unknown_argument(owner: str, name: str, known: Collection[str]) -> ArgumentError:
    """Error for an argument that a constructor does not have."""
    write = f"write `{ARGUMENTS[name]}`." if name in ARGUMENTS else advice(name, known)
    return ArgumentError(f"`{owner}` has no argument `{name}`; {write}", field=name)


def said(value: object) -> str:
    """Short description of a value.

    >>> said("3"), said(list), said([1, 2])
    ("'3'", 'the class list', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | int | float | None):
        return repr(value)
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"


def first_of(names: Sequence[object], most: int = 8, separator: str = ", ") -> str:
    """The first of some names, and the number of the others, such as "a, b and 1 more"."""
    more = f"{separator.strip(' ,')} and {len(names) - most} more" if len(names) > most else ""
    return f"{separator.join(map(str, names[:most]))}{more}"


def format_name(dtype: object) -> str:
    """Name of a number format of torch, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
