"""What a run file may say: every key with its type, its unit in its name, and a sentence of documentation.

One class per table. What is made of a table (`of`) has its defaults; only those that the run file alone has are written
here. It holds what each value must be by itself; what values must be to each other is in
constructors, what keys must be to each other in `check`, and the targets are in `target`.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from evenstep import options
from evenstep.config.schema_data import DataTable, TargetTable
from evenstep.config.schema_lr import TABLES, LrScheduleTable
from evenstep.config.schema_ranks import LaunchTable, ParallelTable
from evenstep.config.section import (
    NAME_OR_TABLE,
    Args,
    Count,
    Names,
    Natural,
    NonNegative,
    Positive,
    ResetWords,
    Section,
    TargetName,
)
from evenstep.data import Mixture, Sampled
from evenstep.events import Best, EarlyStop, Evaluate, Profile
from evenstep.events.hooks.profile import span_of
from evenstep.extras.multitask import GradNorm, Uncertainty
from evenstep.optim.ema import Ema, Evaluated
from evenstep.optim.groups import Grouping, ParameterGroup
from evenstep.options import default_of
from evenstep.precision import Bf16True, Float8Mixed, Fp16Mixed
from evenstep.precision.float8_mixed import Recipe
from evenstep.train import Trainer, load_weights


class InitFromTable(Section, of=load_weights):
    """Weights that something else has trained, which the run begins with; to go on with a run is `resume`."""

    path: str
    """A run, a checkpoint or an average of several; a `.safetensors` file, an index of several or a folder with one, as
    the hub has them; or a file of `torch.save`, of which only tensors are read."""
    only: Names
    """Patterns of the names to load, such as `encoder.*`; what fits none stays as it is initialised."""
    average: bool
    """Whether to take the average that a run has kept of its parameters."""
    partial: bool
    """Whether weights that lack something, have more, or have other shapes may be loaded in part; it is said which."""
    freeze: bool
    """Whether what was loaded is not trained; a hook may unfreeze it."""


class TrainTable(Section, of=(Bf16True, options.Training)):
    """How long to train, and how an update is made."""

    updates: Count | None = None
    """Length of the run in updates. Give either this or `epochs`."""
    epochs: Count | None = None
    """Length of the run in epochs of the training set."""
    precision: Literal[
        "32-true",
        "bf16-mixed",
        "16-mixed",
        "float8-mixed",
        "bf16-true",
        "16-true",
        "bf16-true-no-master",
        "16-true-no-master",
    ] = "32-true"
    """In which number formats the model computes, and in which it is kept."""
    cast_inputs: Literal["after-transfer", "before-transfer"]
    """Where floating inputs of a model of 16 bits are cast: on the device, or before they are moved there."""
    float32_outputs: bool
    """Whether the outputs of a model of 16 bits are cast to float32 for the loss."""
    clip_norm: Positive | None
    """Gradients with a larger global 2-norm are scaled down to it; not clipped by default."""
    norm_statistics: options.NormStatistics
    """Whose running statistics normalisation layers keep: those of all tasks, of each its own, or as they are."""
    channels_last: bool
    """Whether model and images are in channels-last order."""
    check_loss: bool
    """Whether to find out at the start that losses are sums over the units that their weights count, by comparing a
    micro-batch with its halves; false for a loss that is meant over a micro-batch as a whole."""
    settle_every_updates: Count | None
    """How often, in updates, the host waits for the device's verdicts; decided by the device by default."""
    compile: options.Compile
    """Whether `torch.compile` compiles the model, its blocks one by one where it has any, or an update as one graph."""
    max_minutes: Positive | None = None
    """Save and stop with exit code 75 after so many minutes, to be run again; never by default."""
    max_total_minutes: Positive | None = None
    """Save and stop after so many minutes of all starts of the run together, up to what was saved; never by default."""
    stop_below_lr: Positive | None = None
    """Save and stop when the largest learning rate has fallen below this; never by default."""


class OneTaskTable(TargetTable):
    """What a batch means."""

    metrics: dict[str, TargetTable] = Field(default_factory=dict)
    """Further metrics, by name: classes of torchmetrics (extra `torchmetrics`). They see what the task's `loss` gives
    as `observed`."""


class NamedTaskTable(OneTaskTable):
    """One of several tasks, with data of its own."""

    data: DataTable
    """What this task is trained and evaluated on, as the table `data` of a run with one task."""
    coefficient: Positive = 1.0
    """What the gradient of this task's loss is multiplied by."""
    coefficient_schedule: LrScheduleTable | None = None
    """How that changes over the run, as a multiplier of it; it does not by default."""
    repeats: Count = 1
    """Batches of this task in each update (mixture "all"), or updates of it in each round ("round_robin")."""
    sampling_weight: Positive | None = None
    """How often this task is drawn (mixture "sampled"), relative to others; its batches per epoch by default."""
    start_update: Count = 1
    """The first update that this task takes part in."""
    end_update: Count | None = None
    """The last update that this task takes part in; the run's by default."""


class MixtureTable(Section, of=(Mixture, Sampled)):
    """Which tasks' batches make an update."""

    kind: Literal["all", "round_robin", "sampled"] = "all"
    """`all` takes a batch of each task, `round_robin` one task after the other, `sampled` draws tasks at random."""
    end: Literal["min", "max", "cycle"]
    """When an epoch ends: with the first task that is through its data (`min`), or with the last, while the others wait
    (`max`) or begin again (`cycle`)."""
    temperature: Positive
    """Of `sampled`: 1 draws in proportion, more draws flatter."""
    draws: Count
    """Of `sampled`: how many batches an update takes."""


class CoefficientsTable(Section, of=Uncertainty):
    """How much each task's loss counts."""

    kind: Literal["fixed", "uncertainty"] = "fixed"
    """`fixed` takes the tasks' own numbers and their schedules, `uncertainty` learns them with the model."""
    regression: Names
    """Of `uncertainty`: the tasks whose loss is a squared error; others are taken for likelihoods."""


class CombineTable(Section, of=GradNorm):
    """What is made of the tasks' separate gradients. It costs a set of gradients and a reduction per task."""

    kind: Literal["separate", "pc_grad", "aligned_mtl", "grad_norm"] = "separate"
    """Which method; `separate` adds them up, as without this table, which tasks with late weights need."""
    alpha: NonNegative
    """Of `grad_norm`: how strongly tasks that learn slowly are favoured."""
    coefficient_lr: Positive
    """Of `grad_norm`: how fast the coefficients move."""
    parameters: Names
    """Of `grad_norm`: patterns of the shared parameters whose gradients are measured; all by default."""


class LossScaleTable(Section, of=Fp16Mixed):
    """The dynamic loss scale of precisions 16-mixed, 16-true and 16-true-no-master."""

    initial: Positive
    """The first scale."""
    growth_updates: Count
    """The scale is doubled after this many committed updates without an overflow."""
    tolerance: Annotated[float, Field(ge=0, lt=1)]
    """Share of tries since the last change of the scale that may overflow without lowering it for good."""
    floor: Positive
    """The smallest scale: an overflow that would take it lower stops the run."""


class ParameterGroupTable(Section, of=ParameterGroup):
    """What some of the model's parameters have of their own."""

    patterns: Names
    """Of their names, where `*` is any text: ["head.*", "*.bias"]."""
    dims: Natural | None
    """Only those with so many dimensions, 2 for matrices; any by default."""
    lr: Positive | None
    """Learning rate; `optimizer.lr` by default."""
    lr_factor: Positive | None
    """What `optimizer.lr` is multiplied by instead."""
    weight_decay: NonNegative | None
    """Weight decay; that of `optimizer.args` by default."""
    frozen: bool
    """Whether they are not trained."""
    name: str | None = None
    """A class of `torch.optim` for them alone, such as `Muon`; the optimizer's own by default."""
    target: TargetName | None = None
    """The same by the name of a class elsewhere."""
    args: Args = Field(default_factory=dict)
    """Further keyword arguments of it."""
    lr_schedule: LrScheduleTable | None = None
    """An LR schedule of their own; `lr_schedule` by default."""


class Float8Table(Section, of=Float8Mixed):
    """Which layers compute in float8, and how, with precision float8-mixed (extra `float8`)."""

    recipe: Recipe
    """How values are scaled into the range of float8: by tensor, by row, or by row with weight gradients in
    bfloat16."""
    layers: str
    """Whose linear layers: `blocks` for the model's repeated blocks, or a pattern of module names."""
    emulate: bool
    """Whether the same roundings are made in wider numbers, slowly, on any device."""


class OptimizerTable(Section, of=Grouping):
    """What turns a gradient into a step."""

    name: str | None = None
    """A class of `torch.optim`, such as `AdamW`. Give either this or `target`."""
    target: TargetName | None = None
    """An optimizer class, which is called with the parameters, or a function, which is called with the model."""
    lr: Positive
    """Learning rate, which the LR schedule multiplies."""
    args: Args = Field(default_factory=dict)
    """Further keyword arguments, such as `weight_decay`."""
    groups: dict[str, ParameterGroupTable] = Field(default_factory=dict)
    """Parameters with something of their own, by a name for each group; those of no group are `others`."""
    weight_decay_on: Literal["all", "matrices"]
    """`matrices` leaves biases, norms and vectors without weight decay."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None
    """What the learning rate of each layer is multiplied by, compared with the layer behind it; 1 by default."""
    layers: str | None
    """The name of the list of layers that `layer_decay` counts, such as "encoder.blocks"."""

    @property
    def is_divided(self) -> bool:
        """Whether parameters are in groups."""
        return bool(self.groups) or self.weight_decay_on != "all" or self.layer_decay is not None


class FailuresTable(Section, of=options.Failures):
    """What to do about what goes wrong; `docs/failures.md` says what each does exactly."""

    non_finite: options.NonFinite
    """A loss or gradient that is inf or NaN; it is never applied. skip gives the global batch up, retry tries it once
    more, rewind goes back to the last checkpoint, rewind_past also leaves out the data from there to here, drop_task
    applies the update without the tasks that are to blame, also for those that raise an error."""
    out_of_memory: options.OutOfMemory
    """A micro-batch that does not fit into memory: retry cuts it in two, which gives the same gradient."""
    loss_spike: options.LossSpike
    """A loss far above those before."""
    spike_window_updates: Annotated[int, Field(ge=8)]
    """A loss is compared with those of so many updates before."""
    spike_threshold: Positive
    """How many robust standard deviations above their median is a spike."""
    max_rewinds: Count
    """How many times a run may go back before it stops."""
    loader: Literal["stop", "skip"] = "stop"
    """A sample that still can't be read after `loader_retries`: skip leaves it out, with its weight."""
    loader_retries: Natural = 2
    """How many times a sample is read again, and data workers that die or hang are started anew."""
    max_skipped_samples: Natural
    """How many samples may be left out before the run stops."""
    hook: options.HookFailure
    """A hook that raises: continue goes on without what it was about to do."""
    lost_rank: Literal["stop", "continue"] = "stop"
    """A rank of several that is lost: continue deals the update anew over those that are left, and takes the lost one
    in again when it comes back; on CPUs, with ddp or local, and the extra `torchft`."""


class MemoryTable(Section, of=options.Memory):
    """What is done to need less of the device's memory; parameters do not depend on it."""

    checkpoint: str
    """Of which modules activations are computed again in the backward instead of kept: `none`, `blocks` for the
    repeated blocks of the model, or a pattern of module names such as `encoder.layers.*`."""
    empty_cache_every_updates: Count | None
    """How often memory that the device's allocator keeps for later is given back to the device; never by default."""


class EmaTable(Section, of=Ema):
    """An exponential moving average of the parameters, evaluated in their place."""

    decay: Annotated[float, Field(ge=0, lt=1)]
    """Share of the old average that stays at each step."""
    start_update: Natural
    """Up to this update the average is a copy of the parameters, made anew at it."""
    every_updates: Count
    """The average moves at every so many updates only."""
    decay_warmup: bool
    """Whether the decay of the n-th move is at most (1 + n) / (10 + n), so that a short run forgets its beginning."""
    evaluated: Evaluated
    """What evaluations are made with: the average, the parameters, or both, of which the parameters' metrics are called
    `valid/parameters/loss`."""


class EvaluateTable(Section, of=Evaluate):
    """When to evaluate on `data.evaluations`; always at the end of the run as well."""

    every_updates: Count | None
    """Evaluate after every so many updates."""
    every_epochs: Count | None
    """Evaluate after every so many epochs."""
    from_update: Natural
    """Evaluate after no update before this one, so that `checkpoint.best` and `early_stop` count from there too."""


class BestTable(Section, of=Best):
    """Which checkpoints to keep as the best."""

    metric: str = Field()  # to be named in a run file
    """A metric, of an evaluation, such as `valid/loss`, or of training, such as `train/loss`."""
    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""
    keep: Count
    """How many of the best to keep."""


class CheckpointTable(Section, of=options.Checkpointing):
    """When to save, and what to keep; always saved at the end of the run as well."""

    every_updates: Count | None
    """Save after every so many updates."""
    every_epochs: Count | None
    """Save after every so many epochs."""
    every_minutes: Positive
    """Save when this many minutes have gone by since the last save."""
    keep_last: Count
    """How many of the newest checkpoints to keep."""
    keep_every_updates: Count | None
    """Also keep, for good, the checkpoints of every so many updates."""
    best: BestTable | None
    """Also keep the checkpoints with the best values of a metric."""
    asynchronous: bool
    """Whether training waits only until its state is copied in memory, which is then written in the background."""
    mirror: str | None
    """Where each checkpoint is copied to as well, below the name of the run, such as `s3://BUCKET/FOLDER`."""


class EarlyStopTable(Section, of=EarlyStop):
    """When to stop before the end of the run."""

    metric: str = Field()  # to be named in a run file
    """A metric of an evaluation, such as `valid/loss`."""
    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""
    patience_evaluations: Count = 3
    """Stop after this many evaluations in a row without an improvement."""
    min_delta: NonNegative
    """A change of at most this much is no improvement."""


# not a plain union: pydantic would report a wrong value once for each of its members
WriterNameOrTarget = Annotated[
    Annotated[options.WriterName, Tag(NAME_OR_TABLE[0])] | Annotated[TargetTable, Tag(NAME_OR_TABLE[1])],
    Discriminator(lambda value: NAME_OR_TABLE[not isinstance(value, str)]),
]


class ProfileTable(Section, of=Profile):
    """Updates that are profiled into the run folder; `"10:13"` is short for the table."""

    first: Count
    """The first of them."""
    last: Count
    """The last of them."""
    memory: bool
    """Whether allocations on a CUDA device are recorded as well."""


def _updates_in(value: object) -> object:
    if type(value) is not int and not isinstance(value, str):
        return value
    try:
        first, last = span_of(str(value))
    except ValueError:
        first = last = 0
    if first < 1:
        raise PydanticCustomError("span", "it must be the first and the last update, such as 10:13")
    return {"first": first, "last": last}


class LimitTable(Section):
    """How much of the data is taken, for trying out."""

    batches: Count | None = None
    """Only the first so many global batches of each epoch, and the first so many batches of each evaluation; all by
    default."""


class LogTable(Section, of=options.Logging):
    """What is shown and written of the metrics."""

    every_updates: Count
    """Metrics are read from the device, and written, every so many updates; each update's values are kept."""
    writers: Annotated[tuple[WriterNameOrTarget, ...], Field(strict=False)] = options.STANDARD_WRITERS
    """Where metrics go: names, and tables with `target`, callables that give an `evenstep.Writer`, and `args`."""
    flops: bool
    """Whether the floating-point operations of a micro-batch are counted, for perf/flops_per_s and perf/mfu."""
    peak_tflops: Positive | None
    """What one device can do, in 10¹² operations a second; what is known of it by default."""


class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run: its folder is `<runs>/<name>`."""
    runs: str = "runs"
    """Folder of all runs, relative to the working directory."""
    recipe: str = "."
    """Folder of the recipe's Python files, relative to this file; a saved run keeps a copy in `recipe`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = default_of(Trainer, "seed")
    """Decides parameters, data order and dropout."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = default_of(Trainer, "device")
    """Where to compute: auto, cpu, cuda, cuda:N or mps; auto takes an accelerator if there is one."""
    threads: Count | None = None
    """Threads of torch's CPU operators; torch's own choice by default."""
    resume: str = "never"
    """What to start from: `never` (nothing), `auto` (the run folder's newest valid checkpoint, if any), or a path
    of a checkpoint or run folder."""
    reset: ResetWords = ()
    """What of the checkpoint that `resume` names begins afresh: `optimizer`, `lr_schedule`, `metrics`, `data`; several
    in a list, or by commas. The count of updates stays."""
    model: TargetTable
    """The model: a callable that gives a `torch.nn.Module`."""
    init_from: InitFromTable | None = None
    """Weights that the model begins with; as its target has initialised them by default."""
    task: OneTaskTable | None = None
    """The task: a callable that gives an `evenstep.Task`. Give either this and `data`, or `tasks`."""
    data: DataTable | None = None
    """What is trained and evaluated on."""
    tasks: dict[str, NamedTaskTable] = Field(default_factory=dict)
    """Several tasks that are trained together, by name, each with its own data."""
    mixture: MixtureTable | None = None
    """Which tasks' batches make an update; a batch of each by default."""
    coefficients: CoefficientsTable | None = None
    """How much each task's loss counts; as the tasks say by default."""
    combine: CombineTable | None = None
    """What is made of the tasks' separate gradients; by default they are accumulated into one."""
    train: TrainTable
    """How long to train, and how an update is made."""
    loss_scale: LossScaleTable | None = None
    """The dynamic loss scale, with precisions 16-mixed, 16-true and 16-true-no-master only."""
    float8: Float8Table | None = None
    """Which layers compute in float8, with precision float8-mixed only."""
    optimizer: OptimizerTable
    """What turns a gradient into a step."""
    lr_schedule: LrScheduleTable = TABLES["constant"]()
    """How the learning rate changes over the run."""
    parallel: ParallelTable = ParallelTable.empty()
    """How the ranks of a run share the model and its gradients."""
    launch: LaunchTable = LaunchTable()
    """How many processes to start."""
    failures: FailuresTable = FailuresTable.empty()
    """What to do about what goes wrong."""
    memory: MemoryTable = MemoryTable.empty()
    """What is done to need less of the device's memory."""
    ema: EmaTable | None = None
    """An exponential moving average of the parameters; none by default."""
    evaluate: EvaluateTable = EvaluateTable.empty()
    """When to evaluate."""
    checkpoint: CheckpointTable = CheckpointTable.empty()
    """When to save, and what to keep."""
    early_stop: EarlyStopTable | None = None
    """When to stop before the end of the run; never by default."""
    log: LogTable = LogTable.empty()
    """What is shown and written of the metrics."""
    limit: LimitTable = LimitTable()
    """How much of the data is taken, for trying out; all by default."""
    overfit: Count | None = None
    """Train on the first so many samples of the training set again and again, and evaluate on them, for trying out."""
    profile: Annotated[ProfileTable | None, BeforeValidator(_updates_in)] = None
    """Updates that are profiled into the run folder, such as `10:13`; none by default."""
    hooks: Annotated[tuple[TargetTable, ...], Field(strict=False)] = ()
    """Further hooks: callables that give an `evenstep.Hook`."""
