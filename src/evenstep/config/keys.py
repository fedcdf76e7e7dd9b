"""Keys of run files: walks along their JSON schema."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from evenstep.config.run import RunConfig
from evenstep.schema import json_schema
from evenstep.usual_words import KEYS

Tree = dict[str, Any]
Node = Mapping[str, Any]


@cache
def schema() -> Tree:
    """JSON schema of run files."""
    return json_schema(RunConfig)


def _tables(node: Node) -> list[Node]:
    """Tables that a value may be, and tables of them by name or in lists."""
    if "$ref" in node:
        node = schema()["$defs"][node["$ref"].rpartition("/")[2]]
    several = [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]
    own = [node] if "properties" in node else []
    return [*own, *(table for one in several for table in _tables(one))]


def _elements(node: Node) -> Node | None:
    """Schema of the values of a table by name, or of a list, if they are tables."""
    for one in (node, *node.get("anyOf", ())):
        for name in ("additionalProperties", "items"):
            if isinstance(one.get(name), dict) and _tables(one[name]):
                return one[name]
    return None


def all_keys(node: Node | None = None, outer: str = "") -> Iterator[str]:
    """Every key of the run file, dotted, tables themselves included; a name of the user's own is `NAME`."""
    for table in _tables(schema() if node is None else node):
        for name, value in table["properties"].items():
            yield outer + name
            yield from all_keys(value, f"{outer}{name}.")
            inner = _elements(value)
            if inner is not None and "items" not in value:
                yield f"{outer}{name}.NAME"
                yield from all_keys(inner, f"{outer}{name}.NAME.")


def may_change(path: Sequence[str]) -> bool:
    """True for a key that a resumed run may have another value of, as the updates already made don't depend on it.

    >>> may_change(("train", "updates")), may_change(("tasks", "box", "data", "num_workers")), may_change(("seed",))
    (True, True, False)
    """
    nodes: list[Node] = [schema()]
    for key in path:
        values = [table["properties"][key] for node in nodes for table in _tables(node) if key in table["properties"]]
        if any(value.get("mayChange") for value in values):
            return True
        nodes = values or [inner for node in nodes if (inner := _elements(node)) is not None]
    return False


def advice_for(path: Sequence[str]) -> str:
    """End of a sentence about an unknown key: the key that was most likely meant, or those that there are.

    >>> advice_for(("train", "update")), advice_for(("clip_norm",)), advice_for(("learning_rate",))
    ('did you mean `train.updates`?', 'did you mean `train.clip_norm`?', 'did you mean `optimizer.lr`?')
    """
    *outer, last = path
    if last in KEYS:
        return f"did you mean `{KEYS[last]}`?"
    known = sorted(set(all_keys()), key=lambda key: ("NAME" in key, key.count("."), key))
    siblings = [key.rpartition(".")[2] for key in known if _is_in(key, outer)]
    close = [".".join([*outer, one]) for one in get_close_matches(last, siblings, n=1)]
    close += [key for key in known if key.rpartition(".")[2] == last]
    close += get_close_matches(".".join(path), known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"there are {', '.join(siblings)}." if siblings else "leave it out."


def _is_in(key: str, outer: Sequence[str]) -> bool:
    *table, _ = key.split(".")
    return len(table) == len(outer) and all(one in ("NAME", other) for one, other in zip(table, outer, strict=True))
