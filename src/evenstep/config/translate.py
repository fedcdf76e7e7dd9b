"""What constructors refuse, as faults of a run file: names of arguments become keys.

A constructor raises an error that names its arguments in backticks. Here it is called with the values of the run file,
and what it says is translated by a table of keys. There is no rule here.
"""

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager

from evenstep.config.faults import Fault, told
from evenstep.config.section import Section
from evenstep.errors import ArgumentError, CheckpointError, ConfigError, PlanError


def faults_of(build: Callable[[], object], keys: Mapping[str, str], *also: str) -> Iterator[Fault]:
    """What `build` raises, as a fault.

    Args:
        build: a constructor or a check with its arguments, ready to be called.
        keys: the key of the run file that each argument's value comes from; NAME in it is the task or group that is
            said.
        also: further keys that the fault is about.

    >>> def build(): raise ArgumentError("`floor` must be at most the `initial` of 8, but is 9.")
    >>> [fault.text for fault in faults_of(build, {"floor": "loss_scale.floor", "initial": "loss_scale.initial"})]
    ['`loss_scale.floor` must be at most the `loss_scale.initial` of 8, but is 9.']
    >>> def build(): raise ArgumentError("`repeats` of task `box` must be at least 1, but is 0.")
    >>> [fault.text for fault in faults_of(build, {"repeats": "tasks.NAME.repeats"})]
    ['`tasks.box.repeats` must be at least 1, but is 0.']
    """
    try:
        build()
    except (ArgumentError, PlanError) as error:
        yield told(_translated(str(error), keys), *also)


@contextmanager
def said_with(keys: Mapping[str, str], *, called_by: str = "") -> Generator[None]:
    """Raise what is refused inside the `with` as a ConfigError, in the same way; what is wrong in files stays that.

    Args:
        called_by: the key that names what is called there, to be said first where no other key is said.
    """

    def told_of(error: Exception) -> str:
        text = _translated(str(error), keys)
        return f"`{called_by}`: {text}" if called_by and text == str(error) else text

    try:
        yield
    except ConfigError:
        raise
    except (ArgumentError, PlanError) as error:
        raise ConfigError([told_of(error)]) from error
    except CheckpointError as error:
        raise CheckpointError(told_of(error)) from error


def _translated(text: str, keys: Mapping[str, str]) -> str:
    def key_of(found: re.Match[str]) -> str:
        return f"`{keys[found[1]].replace('NAME', found[2] or '')}`" if found[1] in keys else found[0]

    return re.sub(r"`([^`]+)`(?: of (?:task|group) `([^`]+)`)?", key_of, text)


def keys_in(key: str, table: Section) -> dict[str, str]:
    """The keys of arguments that have the names of the keys of `table`, which stands at `key`."""
    return {name: f"{key}.{name}" for name in type(table).model_fields}
