"""The Python objects that a configuration names: all of them found and their arguments checked, none called.

This imports the recipe, and torch to look up optimizers, so it is the slow part of a check.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast, final

from evenstep.arguments import advice
from evenstep.config.arguments import Call, bind
from evenstep.config.schema import Config, OptimizerTable, ParameterGroupTable
from evenstep.config.schema_data import TargetTable
from evenstep.config.section import Section
from evenstep.config.sources import Tree, at
from evenstep.config.target import find
from evenstep.config.tasks import data_tables
from evenstep.errors import ArgumentError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A configuration without faults.

    Args:
        calls: the objects that the configuration names, ready to be called, by their keys, such as `data.train`.
        recipe: the folder of the recipe's Python files, importable while the run is open.
    """

    config: Config
    calls: Mapping[str, Call]
    recipe: Path

    def resolved(self) -> Tree:
        """The configuration as plain tables, defaults and overrides included, paths absolute.

        It is what a run folder keeps: run from there, it finds the recipe's copy in `recipe`.
        """
        return cast("Tree", _without_empty({**self.config.model_dump(exclude_none=True), "recipe": "recipe"}))

    def plain(self) -> Tree:
        """The same in values that JSON has, which checkpoints keep."""
        return cast("Tree", json.loads(json.dumps(self.resolved(), default=str)))


def find_calls(config: Config, *, recipe: Path, folder: Path) -> tuple[dict[str, Call], list[str], list[BaseException]]:
    """Find what the configuration names.

    Args:
        recipe: the recipe's folder, which is importable.
        folder: the run file's, which relative paths among the arguments are relative to.

    Returns:
        The calls by where they stand (`model`, `data.train`, `hooks.0`, …), the faults, and the exceptions that the
        user's own code raised when it was imported.
    """
    calls: dict[str, Call] = {}
    faults: list[str] = []
    causes: list[BaseException] = []

    def add(
        key: str, place: str, found: Callable[[], Callable[..., Any]], args: Mapping[str, Any], **given: Any
    ) -> None:
        try:
            calls[key], wrong = bind(key, found(), args, folder, **given)
            faults.extend(wrong)
        except ArgumentError as error:
            faults.append(f"`{place}` {error}")
            causes.extend([] if error.__cause__ is None else [error.__cause__])

    for key, table in _targets(config):
        add(key, f"{key}.target", partial(find, table.target, recipe), table.args)
    for key, name in ((f"{key}.collate", table.collate) for key, table in data_tables(config).items()):
        if name is not None:
            add(key, key, partial(find, name, recipe), {}, num_given=1)
    optimizer = config.optimizer
    rate = {"lr": "optimizer.lr"}
    wants_class = bool(optimizer.is_divided)
    add(
        "optimizer",
        "optimizer",
        partial(_optimizer, optimizer, recipe, wants_class),
        optimizer.args,
        num_given=1,
        named=rate,
    )
    for name, group in optimizer.groups.items():
        own = optimizer if group.name is None and group.target is None else group
        key = f"optimizer.groups.{name}"
        add(key, key, partial(_optimizer, own, recipe, True), group.args, num_given=1, named=rate)
    return calls, faults, causes


def _targets(value: object, key: str = "") -> Iterator[tuple[str, TargetTable]]:
    if isinstance(value, TargetTable):
        yield key, value
    inner: Iterable[tuple[object, object]] = ()
    if isinstance(value, Section):
        inner = value
    elif isinstance(value, dict):
        inner = cast("dict[str, object]", value).items()
    elif isinstance(value, tuple):
        inner = enumerate(cast("tuple[object, ...]", value))
    for name, one in inner:
        yield from _targets(one, f"{key}.{name}".removeprefix("."))


def _optimizer(optimizer: OptimizerTable | ParameterGroupTable, recipe: Path, wants_class: bool) -> Callable[..., Any]:
    """The class of an optimizer, or a function that makes one.

    Raises:
        ArgumentError: it is not there, or a function where groups need a class.
    """
    if (optimizer.name is None) == (optimizer.target is None):
        raise ArgumentError("must have a `name`, a class of torch.optim, or a `target`; give one of the two.")
    if optimizer.target is not None:
        found = find(optimizer.target, recipe)
        if wants_class and not isinstance(found, type):
            raise ArgumentError("must name a class, as there are groups, but names a function; leave groups to it.")
        return found
    import torch

    name = cast("str", optimizer.name)
    if name == "LBFGS":
        raise ArgumentError("can't be LBFGS, which evaluates the loss several times per step; take any other.")
    names = [other for other, kind in vars(torch.optim).items() if isinstance(kind, type) and other != "Optimizer"]
    if name not in names:
        close = get_close_matches(name.lower(), [other.lower() for other in names], n=1)
        meant = [other for other in names if other.lower() in close]
        raise ArgumentError(f'is "{name}", but must be a class of torch.optim; {advice(name, meant or names)}')
    return cast("Callable[..., Any]", getattr(torch.optim, name))


def with_paths(config: Config, calls: Mapping[str, Call]) -> Config:
    """`config` with the relative paths among its arguments made absolute, so that it can be run from elsewhere."""
    values = config.model_dump()
    for call in calls.values():
        paths = {name: str(value) for name, value in call.arguments.items() if isinstance(value, Path)}
        if paths:
            at(values, call.key.split("."))["args"] |= paths
    return Config.model_validate(values)


def _without_empty(value: object) -> object:
    if isinstance(value, dict):
        pruned = {key: _without_empty(inner) for key, inner in cast("Mapping[str, object]", value).items()}
        return {key: inner for key, inner in pruned.items() if inner not in ({}, [])}
    if isinstance(value, tuple | list):
        return [_without_empty(inner) for inner in cast("Sequence[object]", value)]
    return value
