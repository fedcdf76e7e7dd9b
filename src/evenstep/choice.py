"""Arguments that are a choice: a word of a table of names, or one of two.

An unknown word is answered with the closest. The tables themselves stand beside what they name.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TypeVar

from evenstep.errors import ArgumentError

T = TypeVar("T")


def choose(argument: str, word: str, table: Mapping[str, T]) -> T:
    """What `word` stands for in `table`.

    Args:
        argument: that the word was given for, for the message.

    Raises:
        ArgumentError: it is none of them.

    >>> choose("precision", "bf16", {"bf16-mixed": 1, "bf16-true": 2})
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `precision` must be one of bf16-mixed, bf16-true, but is 'bf16'; is it 'bf16-mixed'?
    """
    if word in table:
        return table[word]
    said = word.lower()
    begins = [name for name in table if said and name.startswith(said)]
    close = begins or get_close_matches(said, table, n=1) or [name for name in table if said and said in name]
    advice = f"; is it {close[0]!r}?" if close else "."
    raise ArgumentError(f"`{argument}` must be one of {', '.join(table)}, but is {word!r}{advice}")


def advice(word: str, known: Collection[str], otherwise: str = "") -> str:
    """The end of a message about a word that is none of `known`: what may have been meant, else `otherwise`.

    >>> advice("adamm", ["adam", "sgd"]), advice("lion", ["adam", "sgd"])
    ('did you mean `adam`?', 'there are adam, sgd.')
    """
    close = get_close_matches(word, known, n=1)
    return f"did you mean `{close[0]}`?" if close else otherwise or f"there are {', '.join(known) or 'none'}."


def check_one_of_two(first: str, second: str, one: object, other: object) -> None:
    """Raise ArgumentError unless one of two arguments is given, the other None."""
    if (one is None) == (other is None):
        both = one is not None
        raise ArgumentError(
            f"`{first}` and `{second}`: one of the two must be given, but {'both are' if both else 'neither is'}; "
            f"{'leave one out' if both else 'set one'}."
        )
