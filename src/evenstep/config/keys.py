"""Which keys there are: walks the schema by a key's path, and finds what a misspelt key may have meant.

It looks at types only, never at a run's values.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from evenstep.config.schema import Config
from evenstep.config.section import NAME_OR_TABLE, Section
from evenstep.usual_words import KEYS


def tables(annotation: Any) -> tuple[type[Section], ...]:
    """The tables that a value of type `annotation` may be; several where a `kind` decides."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    if get_origin(annotation) in (dict, tuple):
        return ()
    return tuple(table for argument in get_args(annotation) for table in tables(argument))


def kind_of(table: type[Section]) -> str | None:
    """The `kind` by which a table is chosen among several, if it is."""
    field = table.model_fields.get("kind")
    return None if field is None else str(field.default)


def locate(place: Sequence[str | int]) -> tuple[tuple[str, ...], tuple[type[Section], ...]]:
    """Where a validation error is.

    Args:
        place: pydantic's location: keys, numbers of list elements, and the `kind` after a table that has one.

    Returns:
        The path without kinds, and the tables that the last key of the path stands in.

    >>> locate(("lr_schedule", "cosine", "end_factor"))[0]
    ('lr_schedule', 'end_factor')
    """
    annotation: Any = Config
    path: list[str] = []
    inside: tuple[type[Section], ...] = ()
    for part in place:
        if part in NAME_OR_TABLE:
            continue
        candidates = tables(annotation)
        chosen = [table for table in candidates if len(candidates) > 1 and kind_of(table) == part]
        if chosen:
            annotation = chosen[0]
            continue
        path.append(str(part))
        inside = candidates
        if candidates:
            fields = [table.model_fields[str(part)] for table in candidates if part in table.model_fields]
            annotation = fields[0].annotation if fields else None
        else:
            container = [inner for inner in (annotation, *get_args(annotation)) if get_origin(inner) in (dict, tuple)]
            annotation = get_args(container[0])[1 if get_origin(container[0]) is dict else 0] if container else None
    return tuple(path), inside


def all_keys(annotation: Any = Config, outer: str = "") -> Iterator[str]:
    """Every key of the run file, dotted, tables themselves included; a name of the user's own is `NAME`.

    >>> sorted(key for key in set(all_keys()) if key.startswith("data.evaluations"))[:2]
    ['data.evaluations', 'data.evaluations.NAME']
    """
    for table in tables(annotation):
        for name, field in table.model_fields.items():
            yield outer + name
            yield from all_keys(field.annotation, f"{outer}{name}.")
    if get_origin(annotation) is dict and tables(get_args(annotation)[1]):
        yield f"{outer}NAME"
        yield from all_keys(get_args(annotation)[1], f"{outer}NAME.")


def meant_by(path: Sequence[str], siblings: Sequence[str]) -> str | None:
    """Key that was most likely meant by the unknown key `path`, whose table has the keys `siblings`.

    >>> meant_by(("train", "update"), ["updates", "epochs"]), meant_by(("clip_norm",), ["name", "train"])
    ('train.updates', 'train.clip_norm')
    >>> meant_by(("train", "max_steps"), ["updates"]), meant_by(("learning_rate",), ["optimizer"])
    ('train.updates', 'optimizer.lr')
    """
    *outer, last = path
    inside = ".".join([*outer, ""])
    if last in KEYS:
        return KEYS[last]
    if "args" in siblings and f"{inside}args.{last}" in KEYS.values():
        return f"{inside}args.{last}"
    if close := get_close_matches(last, siblings, n=1):
        return inside + close[0]
    written = ".".join(path)
    elsewhere = sorted(dict.fromkeys(all_keys()), key=lambda key: ("NAME" in key, key.count(".")))
    same_name = [key for key in elsewhere if key.rpartition(".")[2] == last and not f"{written}.".startswith(f"{key}.")]
    close = [key for key in get_close_matches(written, elsewhere, n=1) if key.count(".") >= len(outer)]
    return next(iter(same_name or close), None)


def advice_for(path: Sequence[str], siblings: Sequence[str]) -> str:
    """End of a sentence about the unknown key `path`, whose table has the keys `siblings`.

    >>> advice_for(("log", "x7"), ["every_updates", "writers"])
    '`log` has every_updates, writers.'
    >>> advice_for(("max_epochs",), ["name", "runs"])
    'did you mean `train.epochs`?'
    """
    if meant := meant_by(path, siblings):
        return f"did you mean `{meant}`?"
    where = f"`{'.'.join(path[:-1])}` has" if len(path) > 1 else "there are"
    return f"{where} {', '.join(siblings)}." if siblings else "leave it out."
