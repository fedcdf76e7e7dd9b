"""Which keys there are: walks the schema by a key's path, and finds what a misspelt key may have meant.

It looks at types only, never at a run's values.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from evenstep.config.schema import Config
from evenstep.config.section import NAME_OR_TABLE, Section
from evenstep.keywords import ours
from evenstep.other_trainers import FOR_ALL, KEYS, WRITE


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


def kinds_with(path: Sequence[str]) -> list[str]:
    """The kinds of a table of which some have the key at `path`.

    >>> kinds_with(("lr_schedule", "decay_updates")), kinds_with(("train", "updates"))
    (['wsd', 'tri_stage'], [])
    """
    having = [table for table in locate(path)[1] if path[-1] in table.model_fields]
    return [kind for table in having if (kind := kind_of(table))]


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


_OF_OPTIMIZERS = (
    *("alpha", "amsgrad", "betas", "dampening", "eps", "foreach", "fused", "maximize", "momentum", "nesterov"),
    "weight_decay",
)
_OF_KINDS = ("name", "type", "kind", "class_path", "_target_")


def meant_by(path: Sequence[str], siblings: Sequence[str]) -> str | None:
    """The key that somebody most likely meant who wrote the unknown key `path` where `siblings` are known.

    >>> meant_by(("train", "update"), ["updates", "epochs"]), meant_by(("clip_norm",), ["name", "train"])
    ('train.updates', 'train.clip_norm')
    >>> meant_by(("train", "max_steps"), ["updates", "epochs"]), meant_by(("data", "num_epochs"), ["shuffle"])
    ('train.updates', 'train.epochs')
    >>> meant_by(("train", "max_iters"), ["updates", "max_minutes"]), meant_by(("grad_accum_steps",), ["data"])
    ('train.updates', 'data.micro_batch_size')
    >>> meant_by(("optimizer", "momentum"), ["name", "lr", "args"]), meant_by(("train", "momentum"), ["updates"])
    ('optimizer.args.momentum', 'optimizer.args.momentum')
    >>> meant_by(("learning_rate",), ["optimizer"]), meant_by(("train", "save_steps"), ["updates", "epochs"])
    ('optimizer.lr', 'checkpoint.every_updates')
    >>> meant_by(("print_freq",), ["log"]), meant_by(("train", "eval_period"), ["updates", "epochs"])
    ('log.every_updates', 'evaluate.every_updates')
    """
    return next(iter(_meant_by(path, siblings)), None)


def _meant_by(path: Sequence[str], siblings: Sequence[str]) -> list[str]:
    """All keys that may have been meant: several where tables have one of the same name, and none is likelier."""
    *outer, last = path
    at_top, inside = outer in ([], ["train"]), ".".join([*outer, ""])
    if "args" in siblings and last in _OF_OPTIMIZERS:
        return [f"{inside}args.{last}"]
    if outer and last in _OF_KINDS:
        return [inside + name for name in ("kind", "name", "target") if name in siblings][:1]
    if answer := KEYS.get(last.lower()):
        if " " in answer:
            return []
        name = answer.rpartition(".")[2]  # intervals are of several tables: theirs say by themselves of which
        is_here = outer and answer.startswith(inside)
        if at_top or is_here or name not in siblings or name.startswith("every_"):
            return [answer]
        return [inside + name]
    if at_top and last in _OF_OPTIMIZERS:
        return [f"optimizer.args.{last}"]
    written = ".".join(path)
    elsewhere = [key for key in dict.fromkeys(all_keys()) if not f"{written}.".startswith(f"{key}.")]
    by_name: dict[str, list[str]] = {}
    for key in sorted(elsewhere, key=lambda key: ("NAME" in key, key.count("."))):
        same = by_name.setdefault(key.rpartition(".")[2], [])
        if "NAME" not in key or not same:
            same.append(key)
    if not outer and last in by_name:  # `--lr`: a key whose tables were left out
        return by_name[last]
    meant = ours(last)
    if here := [name for name in meant if name in siblings]:
        return [inside + here[0]]
    for name in (last, *meant):
        if name in by_name:
            return [key for key in by_name[name] if outer and key.startswith(inside)] or by_name[name]
    if close := get_close_matches(last, siblings, n=1):
        return [inside + close[0]]
    if (whole := get_close_matches(written, elsewhere, n=1)) and whole[0].count(".") >= len(outer):
        return whole
    names = get_close_matches(last, by_name, n=1, cutoff=0.8)  # else "folder" is "loader", of something else
    return by_name[names[0]] if names else []


def advice_for(path: Sequence[str], siblings: Sequence[str]) -> str:
    """What to say about the unknown key `path` where only `siblings` are known.

    >>> advice_for(("log", "x7"), ["every_updates", "writers"])
    '`log` has every_updates, writers.'
    >>> advice_for(("every_n_epochs",), ["name", "runs"])
    'did you mean `evaluate.every_epochs` or `checkpoint.every_epochs`?'
    >>> advice_for(("train", "fast_dev_run"), ["updates", "epochs"])
    'leave it out; `evenstep check RUN.toml` tries one update.'
    >>> advice_for(("output_dir",), ["name", "runs"])
    'the folder of a run is `runs` and, in it, `name`; set these.'
    >>> advice_for(("ema", "momentum"), ["decay"])
    'set `ema.decay`, which is 1 - momentum.'
    """
    if path[-1] == "momentum" and "decay" in siblings:  # of an average
        return f"set `{'.'.join([*path[:-1], 'decay'])}`, which is 1 - momentum."
    if "folder" in (path[-1], *ours(path[-1])) and path[-1] != "path":
        return "the folder of a run is `runs` and, in it, `name`; set these."
    word = path[-1].lower()
    meant = _meant_by(path, siblings)
    if not meant and word in KEYS:
        return f"{KEYS[word]}."
    if WRITE.get(word) in FOR_ALL and word not in KEYS and path[-1] not in _OF_OPTIMIZERS:
        return f"{WRITE[word]}."
    if meant:
        *others, last = [f"`{key}`" for key in meant[:4]]
        return f"did you mean {' or '.join([', '.join(others), last] if others else [last])}?"
    where = f"`{'.'.join(path[:-1])}` has" if len(path) > 1 else "there are"
    return f"{where} {', '.join(siblings)}." if siblings else "leave it out."
