"""The checks of a single argument that constructors of all packages ask: what kind of thing it must be, or which word.

Each says what must be and what was given; an unknown word is answered with the closest. Which numbers make sense stands
with the constructor, a table of names beside what it names; the option objects have rules of their own. Importing this
loads no torch.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from operator import index
from types import UnionType
from typing import Any, SupportsIndex, TypeVar, cast

from evenstep.errors import ArgumentError, CheckpointError, EvenstepError, clause
from evenstep.usual_words import ARGUMENTS, VALUES

T = TypeVar("T")

# what each needs, and of which kind what it has is
_PARTS_OF_STATES: dict[str, tuple[str, dict[str, type]]] = {
    **{name: ("", {}) for name in ("model", "ema", "precision", "trained", "tasks", "hooks", "storage", "lr_schedule")},
    "optimizer": ("class state groups", {"class": str, "state": dict, "groups": list}),
    "progress": ("update position samples skipped", {"update": int, "position": dict, "samples": int, "skipped": int}),
    "run": (
        "seed precision",
        {
            "seed": int,
            "precision": str,
            "settings": dict,
            "evaluate": bool,
            "evaluated_at": dict,
            "cuts": list,
            "config": dict,
        },
    ),
    "data": ("fingerprint states ranks", {"fingerprint": dict, "states": dict, "ranks": int}),
    "position": ("epoch batch", {"epoch": int, "batch": int}),
}


def require_flag(name: str, value: object) -> None:
    """Raise ArgumentError unless `value` is True or False: anything else would be taken for one of them.

    >>> require_flag("shuffle", False)
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"`{name}` must be True or False, but is {said(value)}.", field=name)


def require_whole(name: str, value: object, *, at_least: int = 1, advice: str = "give such a number") -> None:
    """Raise ArgumentError unless `value` is a whole number from `at_least` on.

    Args:
        advice: what to do, as the end of a sentence; "" where there is nothing to say.

    >>> require_whole("limit", 10, at_least=1, advice="10 is usual")
    """
    if type(value) is not int or value < at_least:
        end = f"; {advice}." if advice else "."
        raise ArgumentError(
            f"`{name}` must be a whole number of at least {at_least}, but is {said(value)}{end}", field=name
        )


def require_count(name: str, value: object, *, at_least: int = 1) -> int:
    """`value`, anything that counts, such as a number of numpy's, as an `int` that is at least `at_least`.

    Raises:
        ArgumentError: `value` is not a whole number (a bool is none), or too small.

    >>> require_count("global_batch_size", 32)
    32
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(
            f"`{name}` must be a whole number, but is {value!r} ({type(value).__name__}); "
            f"give an int of at least {at_least}.",
            field=name,
        )
    try:
        number = index(cast(SupportsIndex, value))
    except TypeError:
        raise ArgumentError(
            f"`{name}` must be a whole number, but is {said(value)}; give an int of at least {at_least}.", field=name
        ) from None
    if number < at_least:
        raise ArgumentError(f"`{name}` must be at least {at_least}, but is {number}; raise it.", field=name)
    return number


def require_number(name: str, value: object, within: str = "", must: str = "", advice: str = "set it so") -> None:
    """Raise ArgumentError unless `value` is a number, and in its range, which no NaN is in.

    Args:
        within: the range, such as "[0, 1)" or "(0, inf)"; "" where whoever asks compares it.
        must: what the number must be, in words.
        advice: what to do, as the end of a sentence; "" where there is nothing to say.

    >>> require_number("decay", 0.999, "[0, 1)", "in [0, 1)", "0.999 to 0.9999 is usual")
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f"`{name}` must be a number, but is {said(value)}; give such a number.", field=name)
    if within:
        number, (low, high) = cast("Any", value), map(float, within[1:-1].split(","))
        above = number >= low if within[0] == "[" else number > low
        if not above or not (number <= high if within[-1] == "]" else number < high):
            raise ArgumentError(
                f"`{name}` must be {must}, but is {value}{f'; {advice}' if advice else ''}.", field=name
            )


def require_positive(name: str, value: object) -> None:
    """Raise ArgumentError unless `value` is a number above 0 and below infinity.

    >>> require_positive("every_minutes", 0.5)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ArgumentError(f"`{name}` must be a number above 0, but is {said(value)}; give such a number.", field=name)


def require_rank(rank: int, ranks: int) -> None:
    """Raise ArgumentError unless `rank` is one of `ranks`.

    >>> require_rank(1, 2)
    """
    require_count("ranks", ranks)
    if require_count("rank", rank, at_least=0) >= ranks:
        raise ArgumentError(
            f"`rank` must be below the {ranks} ranks, but is {rank}; ranks count from 0, set `ranks` to their number.",
            field="rank",
        )


def require_seed(value: object) -> None:
    """Raise ArgumentError unless `value` is a whole number, of any sign and size."""
    if type(value) is not int:
        raise ArgumentError(f"`seed` must be a whole number, but is {said(value)}; write `seed=42`.", field="seed")


def require_word(name: str, value: object, words: Collection[str]) -> None:
    """Raise ArgumentError unless `value` is one of `words`.

    >>> require_word("end", "min", ("min", "max"))
    """
    choose(name, value if isinstance(value, str) else repr(value), dict.fromkeys(words))


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
    close = meant(word, table)
    advice = f"; is it {close!r}?" if close else "."
    raise ArgumentError(f"`{argument}` must be one of {', '.join(table)}, but is {word!r}{advice}", field=argument)


def meant(word: str, known: Collection[str]) -> str:
    """Closest of the known words; "" for none.

    >>> meant("fp16", ["bf16-mixed", "16-mixed"]), meant("reduce_lr_on_plateau", ["linear", "plateau"])
    ('16-mixed', 'plateau')
    >>> meant("zero3", ["fsdp", "zero1"]), meant("adamm", ["adam", "sgd"])
    ('fsdp', 'adam')
    """
    word = word.lower()
    if VALUES.get(word) in known:
        return VALUES[word]
    begins = [name for name in known if word and name.startswith(word)]
    close = begins or get_close_matches(word, known, n=1) or [name for name in known if name in word]
    return close[0] if close else ""


def advice(word: str, known: Collection[str], otherwise: str = "") -> str:
    """The end of a message about a word that is none of `known`: what may have been meant, else `otherwise`.

    >>> advice("adamm", ["adam", "sgd"]), advice("lion", ["adam", "sgd"])
    ('did you mean `adam`?', 'there are adam, sgd.')
    """
    close = get_close_matches(word, known, n=1)
    return f"did you mean `{close[0]}`?" if close else otherwise or f"there are {', '.join(known) or 'none'}."


def unknown_argument(owner: str, name: str, known: Collection[str]) -> ArgumentError:
    """Error for an argument that a constructor does not have.

    >>> unknown_argument("Trainer", "max_epochs", ["epochs"]).args[0]
    '`Trainer` has no argument `max_epochs`; write `epochs=…`.'
    """
    write = f"write `{ARGUMENTS[name]}`." if name in ARGUMENTS else advice(name, known)
    return ArgumentError(f"`{owner}` has no argument `{name}`; {write}", field=name)


def check_one_of_two(first: str, second: str, one: object, other: object) -> None:
    """Raise ArgumentError unless one of two arguments is given, the other None."""
    if (one is None) == (other is None):
        both = one is not None
        raise ArgumentError(
            f"`{first}` and `{second}`: one of the two must be given, but {'both are' if both else 'neither is'}; "
            f"{'leave one out' if both else 'set one'}."
        )


def require_object(name: str, value: object, kind: type | UnionType, write: str, *, may_be_none: bool = False) -> None:
    """Raise ArgumentError unless `value` is an object of `kind`.

    Args:
        write: the line to write.

    >>> require_object("seed", 1, int, "`seed=1`")
    """
    if not (isinstance(value, kind) or (may_be_none and value is None)):
        kinds = f"{getattr(kind, '__name__', kind)}{' or None' if may_be_none else ''}"
        raise ArgumentError(f"`{name}` must be an object of {kinds}, but is {said(value)}; write {write}.", field=name)


def require_callable(name: str, value: object, *, purpose: str) -> None:
    """Raise ArgumentError unless `value` can be called.

    >>> require_callable("collate", list, purpose="makes a batch of a list of samples")
    """
    if not callable(value):
        raise ArgumentError(
            f"`{name}` must be a function that {purpose}, but is {value!r}; give one or leave `{name}` out.", field=name
        )


def require_method(
    whose: str, method: Callable[..., object], given: Sequence[object], takes: str, error: type[EvenstepError]
) -> None:
    """Raise `error` for a method of somebody's own that calling it with `given` would not do.

    Args:
        whose: what it is, for people.
        takes: what it is given, for people.

    >>> require_method("`flush` of a writer", lambda: None, (), "no argument", ArgumentError)
    """
    try:
        inspect.signature(method).bind(*given)
    except TypeError as fault:
        raise error(f"{whose} must take {takes}: {clause(str(fault))}.") from fault
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise error(f"{whose} is `async` or has a `yield`, so that calling it would do nothing; write a plain method.")


def require_stream(value: object) -> None:
    """Raise ArgumentError unless `value` is something to write text to, or None."""
    if value is not None and not callable(getattr(value, "write", None)):
        raise ArgumentError(
            f"`stream` must be a text stream, but is {said(value)}; write `stream=sys.stdout`.", field="stream"
        )


def require_table(name: str, value: object, write: str, *, may_be_none: bool = False) -> Mapping[str, Any]:
    """`value`, which must hold something by name; nothing for None, where that may be.

    Raises:
        ArgumentError: it is no mapping, or has something that is no name.

    >>> require_table("weights", {"box": 2.0}, "`weights={'box': 2.0}`")
    {'box': 2.0}
    """
    if value is None and may_be_none:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentError(f"`{name}` must be a dict by names, but is {said(value)}; write {write}.", field=name)
    if no_names := [one for one in cast("Mapping[Any, Any]", value) if not isinstance(one, str)]:
        raise ArgumentError(
            f"`{name}` must be a dict by names, but {no_names[0]!r} is none; write {write}.", field=name
        )
    return cast("Mapping[str, Any]", value)


def require_several(name: str, value: object, kind: type | UnionType, write: str) -> None:
    """Raise ArgumentError unless `value` is a list or tuple of objects of `kind`.

    >>> require_several("ties", [("a", "b")], tuple, "`ties=[('a', 'b')]`")
    """
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"`{name}` must be a list, but is {said(value)}; write {write}.", field=name)
    for one in cast("list[object]", value):
        if not isinstance(one, kind):
            raise ArgumentError(f"`{name}` must be like {write}, but holds {said(one)}; correct that.", field=name)


def require_state(value: object, wanted: str) -> None:
    """Raise CheckpointError unless `value` is a dict of dicts, as all that is known of a run is.

    Args:
        wanted: what gives one, such as "an engine's `state_dict`".
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"a state to load must be what {wanted} gave, but is {said(value)}; give that.")
    for name, part in cast("dict[Any, object]", value).items():
        if not (_is_whole(name, part) if name in _PARTS_OF_STATES else True):
            raise CheckpointError(
                f"a state to load must be what {wanted} gave, but its `{name}` is {said(part)}, not what that keeps "
                f"there; give the state as it was."
            )


def _is_whole(name: str, part: object) -> bool:
    """Whether a part of a state has all that it needs, each of its kind."""
    if not isinstance(part, dict):
        return False
    held = cast("dict[Any, object]", part)
    needed, kinds = _PARTS_OF_STATES[name]
    if not held.keys() >= set(needed.split()):
        return False
    fits = all(isinstance(held[one], kind) for one, kind in kinds.items() if one in held)
    return fits and (name != "progress" or _is_whole("position", held["position"]))


def require_names(name: str, value: object, write: str) -> tuple[str, ...]:
    """`value`, which must be several names.

    Raises:
        ArgumentError: it is none, or a single name, whose letters would be taken for names.

    >>> require_names("regression", ["box"], "`regression=('box',)`")
    ('box',)
    """
    several = isinstance(value, list | tuple)
    names = tuple(cast("Collection[Any]", value)) if several else ()
    if not several or not all(isinstance(one, str) for one in names):
        raise ArgumentError(f"`{name}` must be a list of names, but is {said(value)}; write {write}.", field=name)
    return names


def said(value: object) -> str:
    """What something is, for a message.

    >>> said("3"), said(list), said([1, 2])
    ("'3'", 'the class list itself', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if isinstance(value, str | int | float | None):
        return repr(value)
    kind = type(value).__name__
    if callable(value) and isinstance(getattr(value, "__name__", None), str):
        return f"the function {cast('Any', value).__name__}"
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"


def shortened(text: str, most: int = 60) -> str:
    """A text, cut where it has more than so many characters.

    >>> shortened("abcdef", 5)
    'ab...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_of(names: Sequence[object], most: int = 8, separator: str = ", ") -> str:
    """The first of some names, and how many more there are.

    >>> first_of(["a", "b", "c"], 2), first_of(["it is 1", "it is 2", "it is 3"], 1, "; ")
    ('a, b and 1 more', 'it is 1; and 2 more')
    """
    more = f"{separator.strip(' ,')} and {len(names) - most} more" if len(names) > most else ""
    return f"{separator.join(map(str, names[:most]))}{more}"


def format_name(dtype: object) -> str:
    """A number format of torch's, for a message.

    >>> import torch
    >>> format_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
