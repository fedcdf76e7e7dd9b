"""The hooks and writers that a configuration asks for, around the recipe's own.

Those that every run has, and those that save (`evenstep.train.standard`), are the trainer's. They are built, not
called; in which order they are called is decided here.
"""

from collections.abc import Sequence

from evenstep.config.schema import Config
from evenstep.events import WRITERS, EarlyStop, Evaluate, Hook, TimeBudget, Writer


def build_hooks(config: Config, own: Sequence[Hook]) -> list[Hook]:
    """The hooks of a run.

    Args:
        config: what is asked for.
        own: the recipe's hooks.
    """
    hooks: list[Hook] = []
    if config.evaluate.every_updates is not None or config.evaluate.every_epochs is not None:
        hooks.append(Evaluate(**config.evaluate.model_dump()))
    if config.early_stop is not None:
        hooks.append(EarlyStop(**config.early_stop.model_dump()))
    hooks.extend(own)
    if config.train.max_minutes is not None:
        hooks.append(TimeBudget(max_minutes=config.train.max_minutes))
    return hooks


def build_writers(config: Config) -> list[Writer]:
    """The writers of a run."""
    return [WRITERS[name](config.log.every_updates) for name in config.log.writers]
