"""What a configuration would say if none of its keys had been set.

It has the tables that the configuration has: of an LR schedule the defaults of its own kind, for each of several tasks
the defaults of a task. Keys that must be set, and what stands in `args`, which is for somebody else, have none.
"""

from typing import Any, cast

from evenstep.config.section import Section
from evenstep.config.sources import Tree


def defaults_of(section: Section) -> Tree:
    """The defaults of all keys of `section` that have one; those whose default is None are left out, as in a file.

    >>> from evenstep.config.schema_between import LogTable
    >>> defaults_of(LogTable(every_updates=3))
    {'every_updates': 10, 'writers': ['console', 'jsonl'], 'flops': False}
    """
    found: Tree = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        inner = _of_tables(value)
        if inner is not None:
            if inner:
                found[name] = inner
        elif not field.is_required() and name != "args":
            default = field.get_default(call_default_factory=True)
            if default is not None and not isinstance(default, Section):
                found[name] = _plain(default)
    return found


def _of_tables(value: object) -> Tree | None:
    if isinstance(value, Section):
        return defaults_of(value)
    if isinstance(value, dict) and value:
        tables = cast("dict[str, Any]", value)
        if all(isinstance(one, Section) for one in tables.values()):
            return {name: inner for name, one in tables.items() if (inner := defaults_of(one))}
    return None


def _plain(value: Any) -> Any:
    return [_plain(one) for one in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value
