"""A run's configuration as services take it: one plain value per dotted key. It knows no service."""

from collections.abc import Mapping
from typing import cast

from evenstep.events.event import Json


def flat(config: Mapping[str, Json], outer: str = "") -> dict[str, str | int | float | bool]:
    """The values of `config` by dotted keys; a list is text, and what is None is left out.

    >>> flat({"train": {"updates": 100, "ema": None}, "betas": [0.9, 0.95], "seed": 1})
    {'train.updates': 100, 'betas': '[0.9, 0.95]', 'seed': 1}
    """
    values: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(cast("Mapping[str, Json]", value), f"{outer}{name}.")
        elif value is not None:
            values[f"{outer}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return values
