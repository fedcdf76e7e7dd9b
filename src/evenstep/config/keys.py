"""Keys of run files: walks along their JSON schema, with the values of a run or without."""

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
    """Schema of the values of a table by name, or of a list, if they are tables."""
    for one in (node, *node.get("anyOf", ())):
        for name in ("additionalProperties", "items"):
            if isinstance(one.get(name), dict) and _tables(one[name]):
                return one[name]
    return None


def _table_for(node: Node, given: Mapping[str, Any]) -> Node | None:
    for table in _tables(node):
        kind = table["properties"].get("kind", {}).get("const")
        is_default = "kind" not in given and "kind" not in table.get("required", ())
        if kind is None or given.get("kind") == kind or is_default:
            return table
    return None


def completed(tree: Mapping[str, Any]) -> Tree:
    """The tables of a run file with the defaults of all keys that are left out, except None."""
    return _filled(tree, schema(), given=True)


def defaults_of(tree: Mapping[str, Any]) -> Tree:
    """The tables of a run file as they would be if none of their keys had been set.

    Keys that must be set, and arguments of the user's own objects, are left out.
    """
    return _filled(tree, schema(), given=False)


def _filled(tree: Mapping[str, Any], node: Node, *, given: bool) -> Tree:
    table = _table_for(node, tree)
    properties: Tree = {} if table is None else table["properties"]
    found: Tree = {}
    for key, value in properties.items():
        default = value.get("default", value.get("const") if given else None)
        inner, own = _elements(value), tree.get(key, default)
        if isinstance(own, Mapping) and inner is None and _tables(value):
            found[key] = _filled(cast("Tree", own), value, given=given)
        elif isinstance(own, Mapping) and inner is not None:
            found[key] = {name: _filled(one, inner, given=given) for name, one in cast("Tree", own).items()}
        elif given and inner is not None and own is not None:
            found[key] = [_filled(one, inner, given=True) if isinstance(one, Mapping) else one for one in own]
        elif given or key != "args":
            found[key] = own if given else default
    if not given:
        return {key: value for key, value in found.items() if value not in (None, {})}
    arguments = {key: value for key, value in tree.items() if key not in properties}
    return {key: value for key, value in (found | arguments).items() if value is not None}


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
    close = close or [key for key in known if key.rpartition(".")[2] == last]
    close = close or get_close_matches(".".join(path), known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    where = f"`{'.'.join(outer)}` has" if outer else "there are"
    return f"{where} {', '.join(siblings)}." if siblings else "leave it out."


def _is_in(key: str, outer: Sequence[str]) -> bool:
    *table, _ = key.split(".")
    return len(table) == len(outer) and all(one in ("NAME", other) for one, other in zip(table, outer, strict=True))
