"""What pydantic found wrong with values of a run file, in sentences that say what to write."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from pydantic import ValidationError

from evenstep.config.faults import LISTS, Fault, allowed, listed, one_of, quoted
from evenstep.config.keys import advice_for, kind_of, kinds_with, locate, meant_by, tables
from evenstep.config.section import NAME_OR_TABLE, Section
from evenstep.devices import why_not

Location = tuple[str | int, ...]
"""Where in the configuration pydantic found a fault: keys, numbers of list elements, and the tags of unions."""

_PATTERNS = {
    "target": "must be FILE.py:NAME or package.module:NAME",
    "collate": "must be FILE.py:NAME or package.module:NAME",
    "name": "must begin with a letter or digit and have only a-z, A-Z, digits, `.`, `_` and `-`, being a folder's name",
    "device": "must be auto, cpu, mps, cuda or cuda:N",
}


_OWN_SCHEDULE = (
    "a schedule of your own is for scripts, `Trainer(lr_schedule=…)`; in a run file leave `lr_schedule` out, and let "
    "one of `hooks` set the rates."
)
_TABLE = ("model_type", "model_attributes_type", "dict_type")


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
            advice = advice_for(path, siblings)
            text = _not_of_kind(kinds[0], path, meant, advice) if kinds else f"is not a key; {advice}"
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
            if any(part in NAME_OR_TABLE for part in location):
                text = text.replace("must be a table", "must be a name or a table")
                if kind == "literal_error" and ":" in str(given):
                    text = f"{text.removesuffix('.')}; write `{{target = {quoted(given)}}}`."
            if kind in (*_TABLE, *LISTS, "string_type"):
                text = text.removesuffix(".") + _what_may_be(path, inside, kind, given)
        text = f"`{key}`{'' if kind == 'missing' else origin(path)} {text}"
        fault = Fault(about=(key,), text=text, meant=meant, missing=kind == "missing")
        found.append((location, fault))
    return found


def _not_of_kind(kind: str, path: Sequence[str], meant: str | None, advice: str) -> str:
    """What is said of a key that a table of this kind has not: also whether those of other kinds have it."""
    outer = [*path[:-1]]
    text, choice = f'is not a key of kind "{kind}"', f"`{'.'.join([*outer, 'kind'])}`"
    if theirs := kinds_with(path):
        return f"{text}, but of kind {one_of(theirs)}; set {choice}, or leave it out."
    if path == ("lr_schedule", "target"):
        return f"{text}; {_OWN_SCHEDULE}"
    place = meant.split(".") if meant else []
    theirs = kinds_with(place) if place[:-1] == outer else []
    if not theirs or kind in theirs:
        return f"{text}; {advice}"
    return f"{text}; did you mean `{meant}`, of kind {one_of(theirs)}? Then set {choice} as well."


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
    if kind in LISTS and text.startswith("["):  # a shell takes the inner quotes away
        return f"; quote it for the shell, such as `--{key} '[\"NAME\"]'`."
    if kind in LISTS and text:
        return f"; write `{key} = {f'[{{target = {quoted(text)}}}]' if path[-1] == 'hooks' else listed(text)}`."
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
        if ":" in text and path == ("lr_schedule",):
            return f"; {_OWN_SCHEDULE}"
        if text and first:
            return f"; write `{key}.{first} = {quoted(text)}`."
        kinds = [str(kind_of(table)) for table in made] if len(made) > 1 else []
        return f"; its kinds are {', '.join(kinds)}." if kinds else f"; its keys are {', '.join(keys)}."
    if not fields or not fields[0].description:
        return "."
    first = " ".join(fields[0].description.split()).partition(". ")[0].removesuffix(".")
    return f"; it is: {first[:1].lower()}{first[1:]}."
