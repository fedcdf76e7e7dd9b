"""Answers a call of a constructor or public function that does not fit: an unknown name, one too few, one by place.

Python's own TypeError names the wrong one and not the right one. Who comes from another trainer writes that one's
names, which `other_trainers` knows. Nothing is done unless a call has failed. It loads no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from evenstep.errors import ArgumentError
from evenstep.other_trainers import ATTRIBUTES, BY_NAME, MEANT, WRITE

P = ParamSpec("P")
T = TypeVar("T")

_OF_BATCHES = ("data", "evaluations", "global_batch_size", "micro_batch_size", "global_batch_tokens", "collate")
_MADE_IN_UPDATES = ("Action", "Committed", "Trained")  # many, and not by a person


def ours(word: str) -> Sequence[str]:
    """Our names for what other trainers call `word`, the likeliest first.

    >>> ours("max_epochs"), ours("lr")
    (['epochs'], ['optimizer'])
    """
    return MEANT.get(word.lower(), ())


def answer_calls(target: T) -> T:
    """A public name; if it is a class that a person builds, a call that does not fit is answered from now on.

    Only classes that nobody derives from: what derives from one has a constructor of its own. They stay what they are,
    and tell the same signature.

    >>> class Curve:
    ...     __final__ = True
    ...     def __init__(self, *, warmup_updates=0): pass
    >>> answer_calls(Curve)(warmup_update=3)
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `Curve` has no argument `warmup_update`; did you mean `warmup_updates`?
    """
    kind: Any = target
    if not isinstance(kind, type) or "__final__" not in vars(kind) or kind.__name__ in _MADE_IN_UPDATES:
        return target
    if kind.__new__ is object.__new__ and not hasattr(kind.__init__, "answers"):
        build: Any = _nothing if kind.__init__ is object.__init__ else kind.__init__
        kind.__init__ = answering(build)
    return target


def _nothing(self: object) -> None:
    pass


def answering(constructor: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that answers calls that do not fit."""

    @wraps(constructor)
    def __init__(self: object, /, *args: Any, **given: Any) -> None:
        try:
            constructor(self, *args, **given)
        except TypeError:
            own = signature(constructor)
            check_call(type(self).__name__, own.replace(parameters=[*own.parameters.values()][1:]), args, given)
            raise

    cast("Any", __init__).answers = True
    return __init__


def answered(function: Callable[P, T]) -> Callable[P, T]:
    """A public function, or a method, that answers calls that do not fit; written above its definition.

    >>> @answered
    ... def halve(number, *, rounded=False): return number / 2
    >>> halve(3, round=True)
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `halve` has no argument `round`; did you mean `rounded`?
    """

    @wraps(function)
    def answering_call(*args: P.args, **given: P.kwargs) -> T:
        try:
            return function(*args, **given)
        except TypeError:
            takes, own = signature(function), int("self" in signature(function).parameters)
            takes = takes.replace(parameters=[*takes.parameters.values()][own:])
            check_call(function.__qualname__, takes, args[own:], given)
            raise

    return answering_call


def no_attribute(owner: object, name: str) -> NoReturn:
    """Raise AttributeError, which says what another trainer's name is called here; a class's `__getattr__`."""
    kind = type(owner).__name__
    meant = next((ours for ours, theirs in ATTRIBUTES.get(kind, {}).items() if name in theirs.split()), None)
    here = f"; here it is {meant}" if meant else ""
    raise AttributeError(f"'{kind}' object has no attribute '{name}'{here}", name=name, obj=owner)


def check_call(said: str, takes: Signature, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raise ArgumentError if what takes these parameters can't be called so; the message says what was meant."""
    try:
        takes.bind(*args, **given)
    except TypeError as error:
        text = str(error)
    else:
        return
    parameters = dict(takes.parameters)
    unknown = [name for name in given if name not in parameters]
    if unknown:
        faults = [f"`{said}` has no argument `{name}`; {advice_for(name, parameters)}" for name in unknown]
        raise ArgumentError(" ".join(faults)) from None
    placed = [one.name for one in parameters.values() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(placed):
        by_name = [name for name in parameters if name not in placed]
        many = f"{len(args)} argument{'s' if len(args) > 1 else ''} by place"
        how = f"write `{by_name[0]}=…`" if by_name else "leave the others out"
        most = f"{', '.join(placed)} at most" if placed else "none" if not by_name else "its arguments by name"
        raise ArgumentError(f"`{said}` was given {many}, but takes {most}; {how}.") from None
    placed = placed[: len(args)]
    twice = [name for name in placed if name in given]
    if twice:
        raise ArgumentError(
            f"`{said}` was given `{twice[0]}` twice, by place and by name; leave one of them out."
        ) from None
    lacking = [
        one.name
        for one in parameters.values()
        if one.default is Parameter.empty and one.name not in {*placed, *given} and one.kind is not one.VAR_POSITIONAL
    ]
    if not lacking:
        raise ArgumentError(f"`{said}` can't be called so: {text}; see `help({said})`.") from None
    names = " and ".join(filter(None, [", ".join(f"`{name}`" for name in lacking[:-1]), f"`{lacking[-1]}`"]))
    write = ", ".join(f"{name}=…" for name in lacking)
    raise ArgumentError(f"`{said}` must be given {names} too; write `{said}(…, {write})`.") from None


def advice_for(name: str, known: Mapping[str, object]) -> str:
    """What to write instead of an argument that is none of `known`, as the end of a sentence.

    >>> advice_for("max_epochs", {"epochs": 1, "updates": 1}), advice_for("weigth", {"weight": 1})
    ('write `epochs=…`.', 'did you mean `weight`?')
    >>> advice_for("lr", {"optimizer": 1})
    'write `optimizer=torch.optim.AdamW(model.parameters(), lr=…)`.'
    """
    word = name.lower()
    meant = [word, *ours(word)]
    for one in meant:
        if one in known:
            return f"write {BY_NAME.get(one, f'`{one}=…`')}."
    close = get_close_matches(word, known, n=1, cutoff=0.6 if "task" in known else 0.7)
    if "task" not in known and close:  # neither a trainer nor an engine, to which other trainers' names belong
        return f"did you mean `{close[0]}`?"
    if word in WRITE:
        return f"{WRITE[word]}."
    options = {
        field.name: f"{name}={type(default).__name__}({field.name}=…)"
        for name, one in known.items()
        if is_dataclass(default := getattr(one, "default", None)) and not isinstance(default, type)
        for field in fields(default)
    }
    for one in meant:
        if one in options:
            return f"write `{options[one]}`."
    if "task" in known and "data" not in known and any(one in _OF_BATCHES for one in meant):
        return "an engine is given its batches by whoever calls it: `engine.update(first, second)`."
    for one in meant:
        if one in WRITE:
            return f"{WRITE[one]}."
    if close:
        return f"did you mean `{close[0]}`?"
    if "task" not in known:
        return f"there are {', '.join(known)}." if known else "it takes none."
    if close := get_close_matches(word, options, n=1):
        return f"did you mean `{options[close[0]]}`?"
    if word not in MEANT and (close := get_close_matches(word, MEANT, n=1, cutoff=0.85)):
        return advice_for(close[0], known)
    return f"there are {', '.join(known)}."
