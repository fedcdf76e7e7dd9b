"""The option objects, number formats and hooks of a run, from the tables of its run file that have the same keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.builders.tasks import build_coefficients, build_combine
from evenstep.config.schema import Config
from evenstep.events import Best, EarlyStop, Evaluate, Hook, Profile, StopBelowLr, TimeBudget
from evenstep.optim.ema import Ema
from evenstep.options import Checkpointing, Failures, Logging, Memory, Training, WriterName
from evenstep.precision import PRECISIONS, Float8Mixed, LossScaled, Precision, SixteenBits


def build_training(config: Config) -> Training:
    other = {"updates", "epochs", "precision", *_CASTS, *_BUDGET, "stop_below_lr"}
    return Training(
        **config.train.model_dump(exclude=other),
        ema=None if config.ema is None else Ema(**config.ema.model_dump()),
        coefficients=build_coefficients(config),
        combine=build_combine(config),
        memory=Memory(**config.memory.model_dump()),
    )


def build_checkpointing(config: Config, kept: Mapping[str, Any] | None = None) -> Checkpointing:
    """When to save and what to keep.

    Args:
        kept: plain values that are kept with each checkpoint.
    """
    best = config.checkpoint.best
    return Checkpointing(
        **config.checkpoint.model_dump(exclude={"best"}),
        best=None if best is None else Best(**best.model_dump()),
        config=kept,
    )


def build_failures(config: Config) -> Failures:
    return Failures(**config.failures.model_dump(exclude={"loader", "loader_retries", "lost_rank"}))


def build_logging(config: Config) -> Logging:
    named: list[WriterName] = [one for one in config.log.writers if isinstance(one, str)]
    return Logging(**config.log.model_dump(exclude={"writers"}), writers=named)


def build_precision(config: Config) -> Precision:
    """The precision mode, with its loss scale, its casts and its layers if it has any."""
    kind = PRECISIONS[config.train.precision]
    casts = config.train.model_dump(include=set(_CASTS)) if issubclass(kind, SixteenBits) else {}
    scale = {} if config.loss_scale is None or not issubclass(kind, LossScaled) else config.loss_scale.model_dump()
    layers = {} if config.float8 is None or kind is not Float8Mixed else config.float8.model_dump()
    return kind(**casts, **scale, **layers)


_CASTS = ("cast_inputs", "float32_outputs")
_BUDGET = ("max_minutes", "max_total_minutes")


def build_hooks(config: Config, own: Sequence[Hook]) -> list[Hook]:
    """The hooks of a run, in their order, beside those that each run with a folder has (see `standard_hooks`).

    Args:
        own: the recipe's hooks.
    """
    hooks: list[Hook] = []
    if config.evaluate.every_updates is not None or config.evaluate.every_epochs is not None:
        hooks.append(Evaluate(**config.evaluate.model_dump()))
    if config.early_stop is not None:
        hooks.append(EarlyStop(**config.early_stop.model_dump()))
    if config.profile is not None:
        hooks.append(Profile(**config.profile.model_dump()))
    hooks.extend(own)
    if config.train.stop_below_lr is not None:
        hooks.append(StopBelowLr(config.train.stop_below_lr))
    budget = config.train.model_dump(include=set(_BUDGET), exclude_none=True)
    if budget:
        hooks.append(TimeBudget(**budget))
    return hooks
