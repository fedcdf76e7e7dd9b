"""The tables of a run file about what is done between updates: evaluating, saving, stopping, profiling, writing."""

from typing import Annotated

from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from evenstep import options
from evenstep.config.schema_data import TargetTable
from evenstep.config.section import NAME_OR_TABLE, Count, Natural, NonNegative, Positive, Section
from evenstep.events import Best, EarlyStop, Evaluate, Profile
from evenstep.events.hooks.profile import span_of
from evenstep.events.hooks.target import Mode


class EvaluateTable(Section, of=Evaluate):
    """When to evaluate on `data.evaluations`. The end of the run is always evaluated."""

    every_updates: Count | None
    """Evaluate after every this many updates."""
    every_epochs: Count | None
    """Evaluate after every this many epochs."""
    from_update: Natural
    """Do not evaluate before this update, so that `checkpoint.best` and `early_stop` ignore the beginning of the
    run."""


class BestTable(Section, of=Best):
    """Which checkpoints to keep because they are the best."""

    metric: str = Field()  # to be named in a run file
    """Name of the metric: of an evaluation, such as `valid/loss`, or of training, such as `train/loss`."""
    mode: Mode
    """`min` if smaller is better, `max` if larger is better."""
    keep: Count
    """How many of the best checkpoints to keep."""


class CheckpointTable(Section, of=options.Checkpointing):
    """When to save checkpoints, and which to keep. There is always one at the end of the run."""

    every_updates: Count | None
    """Save after every this many updates."""
    every_epochs: Count | None
    """Save after every this many epochs."""
    every_minutes: Positive
    """Save when this many minutes have passed since the last checkpoint."""
    keep_last: Count
    """How many of the newest checkpoints to keep; older ones are deleted."""
    keep_every_updates: Count | None
    """Never delete the checkpoints of updates that are multiples of this."""
    best: BestTable | None
    """Also keep the checkpoints with the best values of a metric."""
    asynchronous: bool
    """Write checkpoints in the background: training waits only while its state is copied in memory, which needs as much
    memory again."""
    mirror: str | None
    """Also copy each checkpoint to an object store, into a folder named after the run: an fsspec address such as
    `s3://BUCKET/FOLDER`. No copies by default."""


class EarlyStopTable(Section, of=EarlyStop):
    """When to stop before the end of the run because a metric no longer improves."""

    metric: str = Field()  # to be named in a run file
    """Name of an evaluation's metric, such as `valid/loss`."""
    mode: Mode
    """`min` if smaller is better, `max` if larger is better."""
    patience_evaluations: Count = 3
    """Stop after this many evaluations in a row without an improvement."""
    min_delta: NonNegative
    """A change of at most this much, in the metric's own unit, does not count as an improvement."""


# not a plain union: pydantic would report a wrong value once for each of its members
WriterNameOrTarget = Annotated[
    Annotated[options.WriterName, Tag(NAME_OR_TABLE[0])] | Annotated[TargetTable, Tag(NAME_OR_TABLE[1])],
    Discriminator(lambda value: NAME_OR_TABLE[not isinstance(value, str)]),
]


class ProfileTable(Section, of=Profile):
    """Which updates to profile with torch's profiler, into the run folder. `"10:13"` is short for this table."""

    first: Count
    """The first update to profile."""
    last: Count
    """The last update to profile."""
    memory: bool
    """Also record the memory allocations on a CUDA device."""


def updates_in(value: object) -> object:
    if type(value) is not int and not isinstance(value, str):
        return value
    try:
        first, last = span_of(str(value))
    except ValueError:
        first = last = 0
    if first < 1:
        raise PydanticCustomError("span", "it must be the first and the last update, such as 10:13")
    return {"first": first, "last": last}


class LogTable(Section, of=options.Logging):
    """Which metrics are shown and written, and how often."""

    every_updates: Count
    """Read the metrics from the device, and write them, after every this many updates. The values of the updates in
    between are kept."""
    writers: Annotated[tuple[WriterNameOrTarget, ...], Field(strict=False)] = options.STANDARD_WRITERS
    """Where metrics go: names of writers, or tables with a `target` (a callable that returns an `evenstep.Writer`) and
    its `args`."""
    flops: bool
    """Count the floating-point operations of a micro-batch before training, for the metrics perf/flops_per_s and
    perf/mfu."""
    peak_tflops: Positive | None
    """Peak speed of one device in 10¹² operations per second, for perf/mfu. By default that of its model, if evenstep
    knows it."""
