"""Keys of run files: walks their JSON schema along a path, with the values of a run or without."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

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
    """Schema of the values of a table by name, or of a list."""
    for one in (node, *node.get("anyOf", ())):
        for name in ("additionalProperties", "items"):
            if isinstance(one.get(name), dict):
                return one[name]
    return None


def _table_for(node: Node, given: Mapping[str, Any]) -> Node | None:
    tables = _tables(node)
    for table in tables:
        kind = table["properties"].get("kind", {}).get("const")
        if (
            kind is None
            or given.get("kind") == kind
            or ("kind" not in given and "kind" not in table.get("required", ()))
        ):
            return table
    return None


def completed(tree: Mapping[str, Any], node: Node | None = None) -> Tree:
    """The tables of a run file with the defaults of all keys that are left out, except None."""
    table = _table_for(schema() if node is None else node, tree)
    if table is None:
        return dict(tree)
    whole: Tree = {}
    for key, value in table["properties"].items():
        given = tree.get(key, value.get("default", value.get("const")))
        if given is not None:
            whole[key] = _completed(given, value)
    arguments = {key: value for key, value in tree.items() if key not in table["properties"] and value is not None}
    return whole | arguments


def _completed(given: Any, node: Node) -> Any:
    if isinstance(given, Mapping) and _tables(node):
        return completed(cast("Tree", given), node)
    inner = _elements(node)
    if inner is None or not _tables(inner):
        return given
    if isinstance(given, Mapping):
        return {name: completed(one, inner) for name, one in cast("Tree", given).items()}
    return [completed(one, inner) if isinstance(one, Mapping) else one for one in given]


def defaults_of(tree: Mapping[str, Any], node: Node | None = None) -> Tree:
    """The tables of a run file as they would be if none of their keys had been set.

    Keys that must be set, and arguments of the user's own objects, are left out.
    """
    table = _table_for(schema() if node is None else node, tree)
    found: Tree = {}
    for key, value in ({} if table is None else table["properties"]).items():
        given = tree.get(key)
        inner = _elements(value)
        if isinstance(given, Mapping) and _tables(value):
            found[key] = defaults_of(cast("Tree", given), value)
        elif isinstance(given, Mapping) and inner is not None and _tables(inner):
            found[key] = {name: defaults_of(one, inner) for name, one in cast("Tree", given).items()}
        elif value.get("default") is not None and key != "args":
            found[key] = value["default"]
    return {key: value for key, value in found.items() if value != {}}


def all_keys(node: Node | None = None, outer: str = "") -> Iterator[str]:
    """Every key of the run file, dotted, tables themselves included; a name of the user's own is `NAME`.

    >>> sorted(key for key in set(all_keys()) if key.startswith("data.evaluations"))[:2]
    ['data.evaluations', 'data.evaluations.NAME']
    """
    for table in _tables(schema() if node is None else node):
        for name, value in table["properties"].items():
            yield outer + name
            yield from all_keys(value, f"{outer}{name}.")
            inner = _elements(value)
            if inner is not None and "items" not in value and _tables(inner):
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
        by_name = [inner for node in nodes if (inner := _elements(node)) is not None]
        nodes = values or by_name
    return False


def advice_for(path: Sequence[str]) -> str:
    """End of a sentence about an unknown key: the key that was most likely meant, or those that there are.

    >>> advice_for(("train", "update")), advice_for(("clip_norm",)), advice_for(("learning_rate",))
    ('did you mean `train.updates`?', 'did you mean `train.clip_norm`?', 'did you mean `optimizer.lr`?')
    """
    *outer, last = path
    known = list(dict.fromkeys(all_keys()))
    place = [key for key in known if _fits(key.split("."), outer)]
    siblings = [key.rpartition(".")[2] for key in place]
    if last in KEYS:
        return f"did you mean `{KEYS[last]}`?"
    inside = ".".join([*outer, ""])
    close = get_close_matches(last, siblings, n=1)
    if close:
        return f"did you mean `{inside}{close[0]}`?"
    elsewhere = sorted(known, key=lambda key: ("NAME" in key, key.count(".")))
    same = [key for key in elsewhere if key.rpartition(".")[2] == last]
    close = same or get_close_matches(".".join(path), elsewhere, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    where = f"`{'.'.join(outer)}` has" if outer else "there are"
    return f"{where} {', '.join(siblings)}." if siblings else "leave it out."


def _fits(key: Sequence[str], outer: Sequence[str]) -> bool:
    *table, _ = key
    return len(table) == len(outer) and all(one in ("NAME", other) for one, other in zip(table, outer, strict=True))
