"""Option classes of a trainer, which are tables of a run file: train, checkpoint, evaluation, failures and log.

Importing this loads no torch: the classes of objects are imported when one is checked.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen

from evenstep.arguments import check_one_of_two, require_whole
from evenstep.errors import ArgumentError
from evenstep.schema import Count, Instance, Matching, Natural, OneOf, Positive, option

if TYPE_CHECKING:
    from evenstep.events import Best, Writer
    from evenstep.optim.ema import Ema
    from evenstep.train.failures import FailurePolicy
    from evenstep.train.tasks.weighting import Coefficients, Combine

    Combining = Combine | str
else:
    Best = Annotated[Any, Instance("evenstep.events:Best", made=True)]
    Writer = Annotated[Any, Instance("evenstep.events:Writer")]
    Ema = Annotated[Any, Instance("evenstep.optim.ema:Ema", made=True)]
    FailurePolicy = Annotated[Any, Instance("evenstep.train.failures:FailurePolicy")]
    Coefficients = Annotated[
        Any, OneOf("evenstep.train.tasks.weighting:Coefficients", "evenstep.contrib.multitask:COEFFICIENTS")
    ]
    Combining = Annotated[
        Any, OneOf("evenstep.train.tasks.weighting:Combine", "evenstep.contrib.multitask:COMBINES", named=True)
    ]

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
RESERVED = ("loss", "lr", "grad_norm", "clipped", "param_norm", "update_ratio")


@option
class Memory:
    """Options that save memory of the device; parameters do not depend on them."""

    checkpoint: Annotated[str, MinLen(1)] = "none"
    """Modules whose activations are recomputed in the backward instead of kept: `none`, `blocks` for the repeated
    blocks of the model, or a pattern of module names such as `encoder.layers.*`."""


@option
class Training:
    """Options of the computation of updates."""

    may_change: ClassVar[frozenset[str]] = frozenset({"check_loss", "settle_every_updates", "ema"})

    clip_norm: Positive | None = None
    """Scale the gradient down if its 2-norm over all parameters is larger than this. Not clipped by default."""
    ema: Ema | None = None
    """An exponential moving average (EMA) of the parameters, which is evaluated in their place. None by default."""
    coefficients: Mapping[str, Positive] | Coefficients | None = None
    """Factor of the loss of each task: numbers by name, or an object that changes or learns them. 1 by default."""
    combine: Combining | None = None
    """How the gradients of several tasks are combined, such as `pc_grad`, at the cost of one more gradient and one more
    reduction per task. They are added by default."""
    norm_statistics: NormStatistics = "shared"
    """Running statistics of BatchNorm and similar layers: `shared` are updated by every micro-batch of any task;
    `frozen` are not updated, and are used in training as well."""
    check_loss: bool = True
    """Before the first update, compare the loss of one micro-batch with the sum over its halves. Use false for a loss
    that compares the samples of a micro-batch with each other; such a micro-batch is not cut when memory runs out,
    unless its task has a `split`."""
    settle_every_updates: Count | None = None
    """On an accelerator: how many updates may be queued before the host reads whether they were applied. By default as
    many as between two writes of metrics; always 1 with streams or an optimizer that is not fused."""
    compile: Compile = "off"
    """`model` compiles the model by `torch.compile`, each shape separately; results differ in the last digits. `update`
    compiles forward, backward and optimizer step into one graph, for models so small that launching kernels takes most
    of the time."""
    memory: Memory = Memory()
    """Which activations are recomputed instead of kept."""

    def __post_init__(self) -> None:
        if self.compile != "off" and self.memory.checkpoint != "none":
            raise ArgumentError("`compile` and `memory.checkpoint` can't be combined; leave one out.", field="compile")


@option
class Checkpointing:
    """Checkpoints to save into the run's folder, and to keep. There is always one at the end of the run."""

    not_in_files: ClassVar[frozenset[str]] = frozenset({"config"})

    every_updates: Count | None = None
    """Save after every this many updates."""
    every_epochs: Count | None = None
    """Save after every this many epochs."""
    every_minutes: Positive | None = 15.0
    """Save when this many minutes have passed since the last checkpoint."""
    keep_last: Natural | None = 3
    """How many of the newest checkpoints to keep; older ones are deleted. None keeps all, 0 writes none."""
    keep_every_updates: Count | None = None
    """Never delete the checkpoints of updates that are multiples of this."""
    best: Best | None = None
    """Also keep the checkpoints with the best values of a metric."""
    asynchronous: bool = True
    """Write checkpoints in the background, from a copy in memory."""
    mirror: (
        Annotated[str, Matching(r"[a-z][a-z0-9+.-]*://\S(.*\S)?", "an address such as s3://BUCKET/FOLDER")] | None
    ) = None
    """Also copy each checkpoint to an object store, and download it if the run folder lacks it: an fsspec address such
    as `s3://BUCKET/FOLDER`. No copies by default."""
    config: Mapping[str, Any] | None = None
    """Plain values to be saved with checkpoints, such as the resolved configuration. The same on all ranks."""

    def __post_init__(self) -> None:
        asked = [name for name in SAVED_BY if getattr(self, name) is not None]
        if asked and self.keep_last == 0:
            raise ArgumentError(f"`{asked[0]}` needs checkpoints, but `keep_last` is 0; leave one out.", field=asked[0])


@option
class Evaluation:
    """When to evaluate: by default after each epoch. The end of the run is always evaluated."""

    every_updates: Count | None = None
    """Evaluate after every this many updates."""
    every_epochs: Count | None = None
    """Evaluate after every this many epochs. By default after each one, unless `every_updates` is given."""


@option
class Failures:
    """Policies for faults; `docs/failures.md` says exactly what each does."""

    non_finite: NonFinite | FailurePolicy = "stop"
    """For a loss or gradient that is inf or NaN, which is never applied: `stop` ends the run; `skip` leaves this global
    batch out; `retry` tries it once more; `rewind` goes back to the last checkpoint; `rewind_past` also leaves out the
    data since then."""
    out_of_memory: OutOfMemory = "retry"
    """For a micro-batch that does not fit into memory: `retry` cuts it in two until it fits, which gives the same
    gradient; `stop` ends the run."""
    loss_spike: LossSpike | FailurePolicy = "report"
    """For a loss far above the previous ones: `ignore`, `report`, `stop`, `rewind` to the last checkpoint, or
    `rewind_past`, which also leaves out the data since then."""
    spike_window_updates: Annotated[int, Ge(8)] = SPIKE_WINDOW_UPDATES
    """How many previous updates a loss is compared with to find spikes."""
    spike_threshold: Positive = SPIKE_THRESHOLD
    """How many robust standard deviations above the median of those updates counts as a spike."""
    max_rewinds: Count = MAX_REWINDS
    """How many times a run may go back to a checkpoint before it stops."""
    max_skipped_samples: Natural = 100
    """How many samples that can't be read may be left out before the run stops."""
    hook: HookFailure = "stop"
    """For a hook that raises an error and has no `failure_policy` of its own: `stop` ends the run, `continue` goes
    on."""


@option
class Logging:
    """Metrics to show and to write."""

    every_updates: Count = 10
    """Read the metrics from the device, and write those of all updates since, after every this many updates."""
    writers: WriterName | Sequence[WriterName | Writer] | Writer | None = None
    """Where metrics go: names, or `Writer` objects. By default `console` and `jsonl` in a run with a folder. Without
    one `console` on a terminal or in a notebook, else incidents alone to Python's logger "evenstep"."""

    def __post_init__(self) -> None:
        names = [one for one in self.writers if isinstance(one, str)] if isinstance(self.writers, list | tuple) else []
        twice = [name for name in sorted(names) if names.count(name) > 1]
        if twice:
            raise ArgumentError(f'`writers` has "{twice[0]}" twice.', field="writers")


def check_length(updates: object, epochs: object) -> None:
    """Raise ArgumentError for a run without an end, or with two."""
    check_one_of_two("updates", "epochs", updates, epochs)
    for name, count in (("updates", updates), ("epochs", epochs)):
        if count is not None:
            require_whole(name, count)


def check_names(kind: str, names: Iterable[str], reserved: Collection[str]) -> None:
    """Raise ArgumentError for a name of a task or an evaluation that metrics and files cannot have."""
    for name in names:
        if name in reserved or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            text = f"needs a name of letters, digits, `_` and `-`, except {', '.join(reserved)}; rename it."
            raise ArgumentError(f"{kind} `{name}` {text}", field=name)
