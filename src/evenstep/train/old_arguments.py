"""Arguments that a trainer had before there were option objects: taken for one more version, with a warning."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from evenstep.errors import ArgumentError
from evenstep.keywords import answering
from evenstep.options import OPTIONS
from evenstep.renamed import warn

_Function = TypeVar("_Function", bound=Callable[..., Any])

OLD_ARGUMENTS = {
    **{name: f"train.{name}" for name in ("clip_norm", "ema", "coefficients", "combine", "norm_statistics")},
    **{name: f"train.{name}" for name in ("channels_last", "check_loss", "settle_every_updates", "fit_memory")},
    "keep_checkpoints": "checkpoint.keep_last",
    "keep_every_updates": "checkpoint.keep_every_updates",
    "asynchronous_saves": "checkpoint.asynchronous",
    "config": "checkpoint.config",
    "on_non_finite": "failures.non_finite",
    "on_out_of_memory": "failures.out_of_memory",
    "loss_spikes": "failures.loss_spike",
    "max_skipped_samples": "failures.max_skipped_samples",
    "on_hook_error": "failures.hook",
    "log_every_updates": "log.every_updates",
    "writers": "log.writers",
}
"""Each, and the field that it is now."""

_OLD_NONES = {"on_non_finite": "stop", "on_out_of_memory": "retry", "loss_spikes": "ignore"}


def takes_old_arguments(constructor: _Function) -> _Function:
    """A decorator: the old arguments are still taken, and put into their option objects, each with a warning.

    Raises:
        ArgumentError: when called with an old argument and with the option object that it is in now.

    >>> import warnings
    >>> from evenstep.options import Logging
    >>> class Trains:
    ...     @takes_old_arguments
    ...     def __init__(self, *, log=Logging()): self.log = log
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(Trains(log_every_updates=3).log)
    Logging(every_updates=3, writers=None, flops=False, peak_tflops=None)
    >>> str(caught[0].message)
    '`log_every_updates=…` is called `log=Logging(every_updates=…)` now; the old name goes with the next version.'
    """

    built = answering(constructor)

    @wraps(constructor)
    def called(*args: Any, **given: Any) -> Any:
        if not OLD_ARGUMENTS.keys() & given.keys():
            return built(*args, **given)
        kept = {name: value for name, value in given.items() if name not in OLD_ARGUMENTS}
        fields: dict[str, dict[str, Any]] = {}
        for old in [name for name in given if name in OLD_ARGUMENTS]:
            argument, _, field = OLD_ARGUMENTS[old].partition(".")
            new = f"{argument}={OPTIONS[argument].__name__}({field}=…)"
            if argument in given:
                raise ArgumentError(f"`{old}` and `{argument}` are both given; write `{new}` only.")
            warn(f"{old}=…", new)
            fields.setdefault(argument, {})[field] = _OLD_NONES.get(old) if given[old] is None else given[old]
        made = {argument: OPTIONS[argument](**values) for argument, values in fields.items()}
        return built(*args, **kept, **made)

    cast("Any", called).answers = True
    return cast("_Function", called)
