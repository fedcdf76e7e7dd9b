"""Groups of a trainer's options, one class for each; the tables of a run file have the same keys.

    Training       how an update is made         `[train]`, with `[ema]`, `[coefficients]`, `[combine]`, `[memory]`
    Checkpointing  when to save, what to keep    `[checkpoint]`
    Failures       what to do about what fails   `[failures]`
    Logging        where metrics go              `[log]`

Every default, and every rule for a single value, is defined here and nowhere else. Nothing is built here, and importing
this loads neither torch nor the rest of evenstep: the names of their classes are for type checkers.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, cast, final, get_args

from evenstep.arguments import check_one_of_two, require_whole, require_word
from evenstep.errors import ArgumentError

if TYPE_CHECKING:
    from evenstep.events import Best, Writer
    from evenstep.optim.ema import Ema
    from evenstep.train.failures.policy import FailurePolicy
    from evenstep.train.failures.spikes import LossSpikes
    from evenstep.train.tasks.coefficients import Coefficients
    from evenstep.train.tasks.combine import Combine

NonFinite = Literal["stop", "skip", "retry", "rewind", "rewind_past"]
OutOfMemory = Literal["retry", "stop"]
LossSpike = Literal["ignore", "report", "stop", "rewind", "rewind_past"]
HookFailure = Literal["stop", "continue"]
NormStatistics = Literal["shared", "frozen"]
Compile = Literal["off", "model", "update"]
Reset = Literal["optimizer", "lr_schedule", "metrics", "data"]
WriterName = Literal["console", "jsonl", "csv", "tensorboard", "wandb", "mlflow"]

STANDARD_WRITERS: tuple[WriterName, ...] = ("console", "jsonl")
SPIKE_WINDOW_UPDATES = 128
SPIKE_THRESHOLD = 10.0
MAX_REWINDS = 3
SAVED_BY = ("every_updates", "every_epochs", "keep_every_updates", "best", "mirror")  # ask for checkpoints, if given
# metrics that stand beside the tasks' own
RESERVED = ("loss", "lr", "grad_norm", "clipped", "param_norm", "update_ratio", "parameters")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Options that save memory of the device; parameters do not depend on them.

    Args:
        checkpoint: the modules whose activations are recomputed in the backward instead of kept (activation
            checkpointing): "none", "blocks" for the repeated blocks of the model, or a pattern of module names such as
            "encoder.layers.*".
        empty_cache_every_updates: after how many updates each the memory cached by torch's allocator is given back to
            the device, for which the host waits; None for never.

    Raises:
        ArgumentError: a value out of its range.

    >>> Memory(checkpoint="blocks").empty_cache_every_updates is None
    True
    """

    checkpoint: str = "none"
    empty_cache_every_updates: int | None = None

    def __post_init__(self) -> None:
        given = cast("object", self.checkpoint)
        if given == "" or not isinstance(given, str):
            raise ArgumentError(
                f'`checkpoint` must be "none", "blocks" or a pattern of module names such as "encoder.layers.*", but '
                f"is {given!r}."
            )
        every = self.empty_cache_every_updates
        if every is not None:
            require_whole("empty_cache_every_updates", every, at_least=1, advice="None for never")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How an update is computed.

    Args:
        clip_norm: the largest 2-norm of an update's gradient, above 0; a larger gradient is scaled down to it. None
            does not clip.
        ema: an `Ema`, an exponential moving average of the parameters that is evaluated in their place; None for none.
        coefficients: the factor of each task's loss: numbers above 0 by the names of tasks, or a `Coefficients` that
            changes or learns them; 1 each by default.
        combine: how the tasks' gradients are combined, a `Combine` or its name, such as "pc_grad"; by default they are
            added.
        norm_statistics: running statistics of normalisation layers: "shared" are updated by every micro-batch of any
            task; "frozen" are not updated, and are used in training as well.
        channels_last: whether the model and its images are converted to the channels-last memory format.
        check_loss: whether the loss of a micro-batch is compared with the sum over its halves before the first update,
            to find losses that are not sums over the units of their weight. Use False for a loss that is meant over a
            micro-batch as a whole; such a micro-batch is not cut when memory runs out, unless its task has a `split`.
        settle_every_updates: how many updates the host may run ahead of an accelerator before it reads which of them
            were applied; by default as many as between two writes of metrics. On a CPU, with an optimizer that is not
            fused, or with data from a stream it is always 1.
        compile: with "model", `torch.compile` compiles the model, block by block if it has blocks, and each shape
            separately; random numbers are the same as with "off", results differ in the last digits. "update" compiles
            the whole update into one graph, for models so small that launching kernels takes most of the time.
        fit_memory: whether micro-batches are larger than fits into memory at first. The first updates cut them in two
            until they fit, as at any later time (`Failures.out_of_memory`).
        memory: a `Memory`: which activations are recomputed instead of kept.

    Raises:
        ArgumentError: a value out of its range.

    >>> Training(clip_norm=1.0).check_loss
    True
    """

    clip_norm: float | None = None
    ema: "Ema | None" = None
    coefficients: "Coefficients | Mapping[str, float] | None" = None
    combine: "Combine | str | None" = None
    norm_statistics: NormStatistics = "shared"
    channels_last: bool = False
    check_loss: bool = True
    settle_every_updates: int | None = None
    compile: Compile = "off"
    fit_memory: bool = False
    memory: Memory = Memory()

    def __post_init__(self) -> None:
        _check_positive("clip_norm", self.clip_norm, "; None does not clip.")
        require_word("norm_statistics", self.norm_statistics, get_args(NormStatistics))
        require_word("compile", self.compile, get_args(Compile))
        _check_count("settle_every_updates", self.settle_every_updates)
        if self.compile != "off" and self.memory.checkpoint != "none":
            raise ArgumentError(
                f"`compile` must be 'off' where activations are computed again (`memory.checkpoint` is "
                f"{self.memory.checkpoint!r}), but is {self.compile!r}; leave one of them out.",
                field="compile",
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """When checkpoints are written into the run's folder, and which are kept. There is always one at the end of a run.

    Args:
        every_updates: the number of updates between two checkpoints; None does not count updates.
        every_epochs: the number of epochs between two checkpoints; None does not count epochs.
        every_minutes: save when this many minutes have passed since the last checkpoint; None for never.
        keep_last: how many of the newest checkpoints to keep; None keeps all, 0 writes none.
        keep_every_updates: also keep, forever, the checkpoints of updates that are multiples of this.
        best: a `Best`, which also keeps the checkpoints with the best values of a metric; None for none.
        asynchronous: whether checkpoints are written in the background. Training then waits only until the state is
            copied, which needs as much memory again.
        mirror: an address for fsspec, such as "s3://BUCKET/FOLDER", below which each checkpoint is copied to
            a folder with the name of the run folder, and downloaded from if the run folder lacks it; None for
            none.
        config: a dict of plain values to be saved with checkpoints, such as the resolved configuration. All ranks
            must give the same.

    Raises:
        ArgumentError: a value out of its range.

    >>> Checkpointing(every_updates=1000, keep_last=5).every_minutes
    15.0
    """

    every_updates: int | None = None
    every_epochs: int | None = None
    every_minutes: float | None = 15.0
    keep_last: int | None = 3
    keep_every_updates: int | None = None
    best: "Best | None" = None
    asynchronous: bool = True
    mirror: str | None = None
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("every_updates", "every_epochs", "keep_every_updates"):
            _check_count(name, getattr(self, name))
        _check_positive("every_minutes", self.every_minutes)
        _check_count("keep_last", self.keep_last, at_least=0)
        _check_address("mirror", self.mirror)
        _check_table("config", self.config)
        asked = [name for name in SAVED_BY if getattr(self, name) is not None]
        if asked and self.keep_last == 0:
            raise ArgumentError(
                f"`{asked[0]}` asks for checkpoints, but `keep_last` is 0, which writes none; leave one of them out."
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Policies for faults; `docs/failures.md` says exactly what each of them does.

    Args:
        non_finite: for a loss or gradient that is inf or NaN, which is never applied: a `FailurePolicy` or its name.
            "stop" ends the run, "skip" discards the global batch, "retry" tries it once more, "rewind" goes back to the
            last checkpoint, "rewind_past" also leaves out the data since then.
        out_of_memory: for a micro-batch that does not fit: "retry" cuts it in two until it fits, which gives the same
            gradient; "stop", or a `FailurePolicy`.
        loss_spike: for a loss far above those before: "ignore", "report", "stop", "rewind", "rewind_past", a
            `FailurePolicy`, or a `LossSpikes`, which detects spikes in its own way.
        spike_window_updates: the number of previous updates that a loss is compared with, at least 8.
        spike_threshold: how many robust standard deviations above the median of these a spike is, above 0.
        max_rewinds: how many times a run may go back before it stops.
        max_skipped_samples: how many samples that can't be read may be left out (see `MapData`) before the run stops.
        hook: for a hook that raises an error and has no `Hook.failure_policy` of its own: "stop", or "continue"
            without the hook's action.

    Raises:
        ArgumentError: a value out of its range, or a name that is none of these.

    >>> Failures(non_finite="skip").max_skipped_samples
    100
    """

    non_finite: "FailurePolicy | NonFinite" = "stop"
    out_of_memory: "FailurePolicy | OutOfMemory" = "retry"
    loss_spike: "LossSpikes | FailurePolicy | LossSpike" = "report"
    spike_window_updates: int = SPIKE_WINDOW_UPDATES
    spike_threshold: float = SPIKE_THRESHOLD
    max_rewinds: int = MAX_REWINDS
    max_skipped_samples: int = 100
    hook: HookFailure = "stop"

    def __post_init__(self) -> None:
        for name, words in (("non_finite", NonFinite), ("out_of_memory", OutOfMemory), ("loss_spike", LossSpike)):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                require_word(name, value, get_args(words))
        _check_count("spike_window_updates", self.spike_window_updates, at_least=8, may_be_none=False)
        _check_positive("spike_threshold", self.spike_threshold, may_be_none=False)
        _check_count("max_rewinds", self.max_rewinds, may_be_none=False)
        _check_count("max_skipped_samples", self.max_skipped_samples, at_least=0, may_be_none=False)
        require_word("hook", self.hook, get_args(HookFailure))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """Where metrics go, and how often.

    Args:
        every_updates: the number of updates after which metrics are read from the device and given to the writers; the
            values of every update are kept.
        writers: one or several `Writer` objects or names: "console", "jsonl", "csv", "tensorboard", "wandb",
            "mlflow". None means "console" and "jsonl" in a run with a folder. In a run without one it
            means "console" on a terminal or in a notebook; else only incidents are told, by Python's logger "evenstep".
            `()` writes nothing.
        flops: whether the floating-point operations of a micro-batch are counted before training, for the metrics
            perf/flops_per_s and perf/mfu.
        peak_tflops: the peak of one device, in 10¹² operations per second, for perf/mfu; by default that of its model,
            if evenstep knows it.

    Raises:
        ArgumentError: `every_updates` below 1, a writer that is named twice, or a peak without `flops`.

    >>> Logging(writers="csv").every_updates
    10
    """

    every_updates: int = 10
    writers: "Sequence[Writer | WriterName] | Writer | WriterName | None" = None
    flops: bool = False
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        _check_count("every_updates", self.every_updates, may_be_none=False)
        _check_positive("peak_tflops", self.peak_tflops)
        if self.peak_tflops is not None and not self.flops:
            raise ArgumentError(
                f"`peak_tflops` is what the counted operations are compared with, but `flops` is {self.flops}; set "
                f"`flops` as well.",
                field="peak_tflops",
            )
        names = [one for one in self.writers if isinstance(one, str)] if isinstance(self.writers, list | tuple) else []
        twice = [name for name in sorted(names) if names.count(name) > 1]
        if twice:
            raise ArgumentError(f'`writers` has "{twice[0]}" more than once; name each writer once.')


def check_length(updates: object, epochs: object) -> None:
    """Raise ArgumentError for a run without an end, or with two."""
    check_one_of_two("updates", "epochs", updates, epochs)
    for name, count in (("updates", updates), ("epochs", epochs)):
        _check_count(name, count)


def check_rewinds(keep_last: int | None, **policies: object) -> None:
    """Raise ArgumentError for a policy that goes back where too few checkpoints are kept to go back to.

    Args:
        keep_last: how many of the newest checkpoints are kept; None for all.
        policies: those that may go back, as they were given, by their names.
    """
    if keep_last is None or keep_last >= 2:
        return
    for name, policy in policies.items():
        what = f'"{policy}"' if isinstance(policy, str) else f"{type(policy).__name__}"
        raise ArgumentError(
            f"`{name}` is {what}, which goes back to a checkpoint from before the fault, but `keep_last` is "
            f"{keep_last}: the only one may be from after it; keep 2 or more.",
            field=name,
        )


def check_task_names(names: Iterable[str]) -> None:
    """Raise ArgumentError for a task's name that metrics and files cannot have."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in RESERVED:
            raise ArgumentError(
                f"`{name}` must have a name of letters, digits, `_` and `-` that is none of {', '.join(RESERVED)}, "
                f"which stand beside the tasks' metrics; rename it.",
                field=name,
            )


def check_evaluation_names(names: Iterable[str]) -> None:
    """Raise ArgumentError for a name of an evaluation that would mix its metrics with others."""
    for name in names:
        if name in ("train", "perf", "progress") or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ArgumentError(
                f'`{name}` must have a name of letters, digits, `_` and `-` that isn\'t "train", '
                f'"perf" or "progress", which other metrics begin with; call it "valid" or "test".'
            )


OPTIONS = {"train": Training, "checkpoint": Checkpointing, "failures": Failures, "log": Logging}
"""The option classes, by the trainer's arguments, which are the tables of a run file."""


def default_of(constructor: Callable[..., object], name: str) -> Any:
    """What `constructor` takes for an argument that is not given.

    >>> default_of(Logging, "every_updates")
    10
    """
    return signature(constructor).parameters[name].default


def _check_count(name: str, value: object, *, at_least: int = 1, may_be_none: bool = True) -> None:
    if value is not None or not may_be_none:
        require_whole(name, value, at_least=at_least, advice="")


def _check_positive(name: str, value: object, advice: str = ".", *, may_be_none: bool = True) -> None:
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArgumentError(f"`{name}` must be a finite number above 0, but is {value!r}{advice}", field=name)


def _check_address(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9+.-]*://\S(.*\S)?", value)):
        raise ArgumentError(
            f"`{name}` must be an address such as 's3://BUCKET/FOLDER', but is {value!r}; write it so.", field=name
        )


def _check_table(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ArgumentError(f"`{name}` must be a dict, but is a {type(value).__name__}; write `{name}={{'lr': 0.1}}`.")
