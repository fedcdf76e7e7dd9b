"""The Python objects that a configuration names: all of them found and their arguments checked, none called.

This imports the recipe, and torch to look up optimizers, so it is the slow part of a check.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast, final

from evenstep.config.arguments import Call, bind
from evenstep.config.faults import Fault
from evenstep.config.schema import Config, OneTask, Optimizer, Target
from evenstep.config.sources import at
from evenstep.config.target import find
from evenstep.config.tasks import data_tables
from evenstep.errors import ArgumentError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a configuration names, ready to be called.

    Args:
        by_key: the calls, by where they stand: `model`, `data.train`, `hooks.0`, …
    """

    by_key: Mapping[str, Call]

    def __getitem__(self, key: str) -> Call:
        return self.by_key[key]

    def get(self, key: str) -> Call | None:
        """The call of `key`, if there is one."""
        return self.by_key.get(key)

    def all(self) -> Sequence[Call]:
        """Every call."""
        return tuple(self.by_key.values())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Finder:
    recipe: Path
    folder: Path
    found: dict[str, Call] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    causes: list[BaseException] = field(default_factory=list)

    def add(
        self,
        key: str,
        find_it: Callable[[], Callable[..., Any]],
        args: Mapping[str, Any],
        *,
        at: str,
        num_given: int = 0,
        named: Mapping[str, str] | None = None,
    ) -> None:
        """Find one target and check its arguments; `at` is the key that holds its name."""
        try:
            function = find_it()
        except ArgumentError as error:
            self.faults.append(Fault(about=(at,), text=f"`{at}` {error}"))
            if error.__cause__ is not None:
                self.causes.append(error.__cause__)
            return
        call, faults = bind(key, function, args, self.folder, num_given=num_given, named=named)
        self.found[key] = call
        self.faults.extend(faults)


def find_calls(config: Config, *, recipe: Path, folder: Path) -> tuple[Calls, list[Fault], list[BaseException]]:
    """Find what the configuration names.

    Args:
        config: the values.
        recipe: the recipe's folder, which is importable.
        folder: the run file's, which relative paths among the arguments are relative to.

    Returns:
        The calls, the faults, and the exceptions that the user's own code raised when it was imported.
    """
    finder = _Finder(recipe=recipe, folder=folder)
    data = data_tables(config)
    targets: dict[str, Target] = {
        "model": config.model,
        **tasks_of(config),
        **{
            f"{key}.metrics.{name}": metric
            for key, task in tasks_of(config).items()
            for name, metric in task.metrics.items()
        },
        **{f"{key}.train": table.train for key, table in data.items()},
        **{
            f"{key}.evaluations.{name}": target
            for key, table in data.items()
            for name, target in table.evaluations.items()
        },
        **{f"hooks.{index}": target for index, target in enumerate(config.hooks)},
    }
    for key, target in targets.items():
        finder.add(key, partial(find, target.target, recipe), target.args, at=f"{key}.target")
    for key, table in data.items():
        if table.collate is not None:
            at = f"{key}.collate"
            finder.add(at, partial(find, table.collate, recipe), {}, at=at, num_given=1)
    optimizer = config.optimizer
    if (optimizer.name is None) != (optimizer.target is None):
        at = "optimizer.name" if optimizer.target is None else "optimizer.target"
        named = {"lr": "optimizer.lr"}
        finder.add("optimizer", partial(_optimizer, optimizer, recipe), optimizer.args, at=at, num_given=1, named=named)
    return Calls(by_key=finder.found), finder.faults, finder.causes


def tasks_of(config: Config) -> dict[str, OneTask]:
    """The tables of all tasks, by key."""
    alone = {} if config.task is None else {"task": config.task}
    return {**alone, **{f"tasks.{name}": task for name, task in config.tasks.items()}}


def _optimizer(optimizer: Optimizer, recipe: Path) -> Callable[..., Any]:
    if optimizer.target is not None:
        return find(optimizer.target, recipe)
    import torch

    name = cast("str", optimizer.name)
    names = [
        other
        for other, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and other not in ("Optimizer", "LBFGS")
    ]
    if name == "LBFGS":
        raise ArgumentError("can't be LBFGS, which evaluates the loss several times per step; take any other.")
    if name not in names:
        close = [other for other in names if other.lower() == name.lower()] or get_close_matches(name, names, n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(names))}."
        raise ArgumentError(f'must be a class of torch.optim, but is "{name}"; {advice}')
    return cast("Callable[..., Any]", getattr(torch.optim, name))


def with_paths(config: Config, calls: Calls) -> Config:
    """`config` with the relative paths among its arguments made absolute, so that it can be run from elsewhere."""
    values = config.model_dump()
    for call in calls.all():
        paths = {name: str(value) for name, value in call.arguments.items() if isinstance(value, Path)}
        if paths:
            at(values, call.key.split("."))["args"] |= paths
    return Config.model_validate(values)
