"""The option objects of a run, from the tables of its run file that have the same keys."""

from collections.abc import Mapping
from typing import Any

from evenstep.builders.tasks import build_coefficients, build_combine
from evenstep.config.schema import Config
from evenstep.events import Best
from evenstep.optim.ema import Ema
from evenstep.options import Checkpointing, Failures, Training


def build_training(config: Config) -> Training:
    """How an update is made."""
    return Training(
        **config.train.model_dump(exclude={"updates", "epochs", "precision", "max_minutes"}),
        ema=None if config.ema is None else Ema(**config.ema.model_dump()),
        coefficients=build_coefficients(config),
        combine=build_combine(config),
        fit_memory=config.data is not None and config.data.micro_batch_size == "auto",
    )


def build_checkpointing(config: Config, kept: Mapping[str, Any] | None = None) -> Checkpointing:
    """When to save and what to keep.

    Args:
        config: of the run.
        kept: plain values that are kept with each checkpoint.
    """
    best = config.checkpoint.best
    return Checkpointing(
        **config.checkpoint.model_dump(exclude={"best"}),
        best=None if best is None else Best(**best.model_dump()),
        config=kept,
    )


def build_failures(config: Config) -> Failures:
    """What to do about what goes wrong."""
    return Failures(**config.failures.model_dump(exclude={"loader", "loader_retries", "lost_rank"}))
