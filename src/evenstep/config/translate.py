"""Rules that stand where things are constructed, as faults of a run file: names of arguments become keys.

A constructor raises ArgumentError, which names its arguments in backticks. Here they are called with the values of the
run file, and what they say is translated by a table of keys. There is no rule here.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from evenstep.config.faults import Fault
from evenstep.errors import ArgumentError


def faults_of(rule: Callable[[], object], keys: Mapping[str, str]) -> Iterator[Fault]:
    """What `rule` raises, as a fault.

    Args:
        rule: a constructor or a check with its arguments, ready to be called.
        keys: the key of the run file that each argument's value comes from.

    >>> def rule(): raise ArgumentError("`floor` must be at most the `initial` of 8, but is 9.")
    >>> [fault.text for fault in faults_of(rule, {"floor": "loss_scale.floor", "initial": "loss_scale.initial"})]
    ['`loss_scale.floor` must be at most the `loss_scale.initial` of 8, but is 9.']
    """
    try:
        rule()
    except ArgumentError as error:
        named = [keys[name] for name in re.findall(r"`([^`]+)`", str(error)) if name in keys]
        text = re.sub(r"`([^`]+)`", lambda found: f"`{keys.get(found[1], found[1])}`", str(error))
        yield Fault(about=tuple(dict.fromkeys(named)), text=text)


def keys_in(table: str, *names: str) -> dict[str, str]:
    """The keys of arguments that have the names of the keys of one table.

    >>> keys_in("train", "updates", "epochs")
    {'updates': 'train.updates', 'epochs': 'train.epochs'}
    """
    return {name: f"{table}.{name}" for name in names}
