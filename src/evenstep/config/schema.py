"""What a run file may say: every key with its type, its unit in its name, and a sentence of documentation.

One class per table. What is made of a table (`of`) has its defaults; only those that the run file alone has are written
here. It holds what each value must be by itself; what values must be to each other is in constructors, what keys must
be to each other in `check`, and the targets are in `target`.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from evenstep import options
from evenstep.config.schema_between import (
    CheckpointTable,
    EarlyStopTable,
    EvaluateTable,
    LogTable,
    ProfileTable,
    updates_in,
)
from evenstep.config.schema_data import DataTable, TargetTable
from evenstep.config.schema_lr import TABLES, LrScheduleTable
from evenstep.config.schema_ranks import LaunchTable, ParallelTable
from evenstep.config.section import (
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
from evenstep.contrib.multitask import GradNorm, Uncertainty
from evenstep.data import Mixture, Sampled
from evenstep.data.mixture import End
from evenstep.optim.ema import Ema, Evaluated
from evenstep.optim.groups import DecayOn, Grouping, ParameterGroup
from evenstep.options import default_of
from evenstep.precision import Bf16True, Float8Mixed, Fp16Mixed, Recipe, Where
from evenstep.train import Trainer, load_weights


class InitFromTable(Section, of=load_weights):
    """Weights to start the run with, trained elsewhere. To continue a run, use `resume` instead."""

    path: str
    """Where the weights are: a run folder, a checkpoint or an averaged one; a `.safetensors` file, the index of a
    sharded one, or a folder with either, as on the Hugging Face Hub; or a file written by `torch.save`, of which only
    tensors are read."""
    only: Names
    """Patterns of parameter names to load, such as `encoder.*`. Parameters that match none keep their initial values.
    By default all are loaded."""
    average: bool
    """Load the moving average (EMA) of the parameters that the run has kept, instead of the parameters."""
    partial: bool
    """Allow missing, additional or differently shaped weights: what fits is loaded, and the rest is listed. Without it
    such a file is refused."""
    freeze: bool
    """Do not train what was loaded. A hook may unfreeze it later."""


class TrainTable(Section, of=(Bf16True, options.Training)):
    """How long to train, and how each update is computed."""

    updates: Count | None = None
    """Length of the run, in updates (optimizer steps). Give either this or `epochs`."""
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
    """Number formats. `32-true` is float32 throughout; `-mixed` keeps float32 parameters and computes in the smaller
    format; `-true` also keeps the model in that format, with float32 master weights in the optimizer; `-no-master` does
    without those."""
    cast_inputs: Where
    """For 16-bit models: whether floating-point inputs are cast after they were moved to the device, or before, which
    moves fewer bytes."""
    float32_outputs: bool
    """For 16-bit models: cast the model's outputs to float32 before the loss is computed."""
    clip_norm: Positive | None
    """Scale the gradient down if its 2-norm over all parameters is larger than this. By default it is not clipped."""
    norm_statistics: options.NormStatistics
    """Running statistics of BatchNorm and similar layers: `shared` are updated by every micro-batch of any task;
    `frozen` are not updated, and are used in training as well."""
    channels_last: bool
    """Convert the model and its images to the channels-last memory format, which makes convolutions faster on many
    devices."""
    check_loss: bool
    """Before the first update, check that the loss is a sum, by comparing that of one micro-batch with the sum over its
    two halves. Use false for a loss that compares the samples of a micro-batch with each other."""
    settle_every_updates: Count | None
    """On an accelerator: how many updates may be queued before the host waits to read whether they were applied (a
    non-finite gradient is not). By default as many as `log.every_updates`; on a CPU always 1."""
    compile: options.Compile
    """Use `torch.compile`: `model` compiles the model (block by block, if it has repeated blocks), `update` compiles
    forward, backward and optimizer step into one graph."""
    max_minutes: Positive | None = None
    """Save and stop after this many minutes, with exit code 75, so that `evenstep resume` can continue. No limit by
    default."""
    max_total_minutes: Positive | None = None
    """Save and stop after this many minutes of training, summed over all starts of the run. Time that was not saved
    does not count. No limit by default."""
    stop_below_lr: Positive | None = None
    """Save and stop once the largest learning rate of all parameter groups falls below this. Never by default."""


class OneTaskTable(TargetTable):
    """The task: which inputs the model gets from a batch, and how the loss is computed."""

    metrics: dict[str, TargetTable] = Field(default_factory=dict)
    """Additional metrics, by name: `torchmetrics` classes (extra `torchmetrics`). They are updated with what the task's
    `loss` returns as `observed`."""


class NamedTaskTable(OneTaskTable):
    """One of several tasks, with data of its own."""

    data: DataTable
    """Training and evaluation data of this task; the same keys as the table `data` of a run with one task."""
    coefficient: Positive = 1.0
    """Multiplies the gradient of this task's loss."""
    coefficient_schedule: LrScheduleTable | None = None
    """Changes the coefficient over the run, as a learning rate schedule changes the learning rate. Constant by
    default."""
    repeats: Count = 1
    """Mixture `all`: how many batches of this task each update takes. Mixture `round_robin`: how many updates of each
    round are this task's."""
    sampling_weight: Positive | None = None
    """Mixture `sampled`: how often this task is drawn, relative to the others. By default its number of batches per
    epoch."""


class MixtureTable(Section, of=(Mixture, Sampled)):
    """How batches of several tasks are combined into updates."""

    kind: Literal["all", "round_robin", "sampled"] = "all"
    """`all`: each update takes a batch of every task. `round_robin`: the tasks take turns, one per update. `sampled`:
    tasks are drawn at random."""
    end: End
    """When an epoch ends: `min` as soon as one task has used up its data; `max` and `cycle` when all have, where the
    tasks that finish earlier pause (`max`) or start over (`cycle`)."""
    temperature: Positive
    """Mixture `sampled`: 1 draws tasks in proportion to `sampling_weight`; larger values draw them more evenly."""
    draws: Count
    """Mixture `sampled`: how many batches are drawn for each update."""


class CoefficientsTable(Section, of=Uncertainty):
    """How the losses of several tasks are weighted against each other."""

    kind: Literal["fixed", "uncertainty"] = "fixed"
    """`fixed` uses each task's `coefficient` and schedule; `uncertainty` learns the coefficients together with the
    model."""
    regression: Names
    """Kind `uncertainty`: names of the tasks whose loss is a squared error. The others are treated as likelihoods
    (classification)."""


class CombineTable(Section, of=GradNorm):
    """How the gradients of several tasks are combined. Costs the memory of one more gradient, and one more reduction
    over ranks, per task."""

    kind: Literal["separate", "pc_grad", "aligned_mtl", "grad_norm"] = "separate"
    """The method. `separate` adds the gradients up, with the same result as without this table; tasks with a late
    weight need it."""
    alpha: NonNegative
    """Kind `grad_norm`: how strongly tasks that learn slowly are favoured; 0 makes all gradient norms equal."""
    coefficient_lr: Positive
    """Kind `grad_norm`: learning rate of the coefficients."""
    parameters: Names
    """Kind `grad_norm`: patterns of the names of the shared parameters whose gradients are measured. All by default."""


class LossScaleTable(Section, of=Fp16Mixed):
    """Dynamic loss scaling, for the precisions 16-mixed, 16-true and 16-true-no-master."""

    initial: Positive
    """The loss scale at the start of the run."""
    growth_updates: Count
    """Double the scale after this many updates in a row without an overflow."""
    tolerance: Annotated[float, Field(ge=0, lt=1)]
    """Share of updates since the last change of the scale, 0 to 1, that may overflow before the scale is lowered for
    good. With 0 each overflow lowers it."""
    floor: Positive
    """The smallest scale. An overflow at this scale stops the run."""


class ParameterGroupTable(Section, of=ParameterGroup):
    """Settings of some of the model's parameters that differ from those of the rest."""

    patterns: Names
    """Which parameters, by name; `*` stands for any text: ["head.*", "*.bias"]."""
    dims: Natural | None
    """Only parameters with this many dimensions, such as 2 for matrices. Any number by default."""
    lr: Positive | None
    """Learning rate of this group. By default `optimizer.lr`."""
    lr_factor: Positive | None
    """Learning rate of this group as a multiple of `optimizer.lr`. Give either this or `lr`."""
    weight_decay: NonNegative | None
    """Weight decay of this group. By default the one in `optimizer.args`; with a `name` or `target` of its own, the
    default of that class."""
    frozen: bool
    """Do not train these parameters."""
    name: str | None = None
    """Another optimizer for this group: a class of `torch.optim`, such as `Muon`. By default the one of `optimizer`."""
    target: TargetName | None = None
    """Another optimizer for this group, as `FILE.py:NAME` or `package.module:NAME`."""
    args: Args = Field(default_factory=dict)
    """Additional keyword arguments of that optimizer."""
    lr_schedule: LrScheduleTable | None = None
    """Learning rate schedule of this group. By default the run's `lr_schedule`."""


class Float8Table(Section, of=Float8Mixed):
    """Which linear layers compute in float8, for precision float8-mixed (extra `float8`)."""

    recipe: Recipe
    """Granularity of the float8 scales: one per tensor, one per row, or one per row with the gradients of weights
    computed in bfloat16."""
    layers: str
    """Which linear layers: `blocks` for those in the model's repeated blocks, or a pattern of module names."""
    emulate: bool
    """Compute the same roundings with wider numbers: slow, but on any device. For tests."""


class OptimizerTable(Section, of=Grouping):
    """The optimizer and its parameter groups."""

    name: str | None = None
    """A class of `torch.optim`, such as `AdamW`. Give either this or `target`."""
    target: TargetName | None = None
    """`FILE.py:NAME` or `package.module:NAME`: an optimizer class, called with the parameters, or a function, called
    with the model, that returns an optimizer."""
    lr: Positive
    """Learning rate, which `lr_schedule` multiplies."""
    args: Args = Field(default_factory=dict)
    """Additional keyword arguments of the optimizer, such as `weight_decay`."""
    groups: dict[str, ParameterGroupTable] = Field(default_factory=dict)
    """Parameter groups with their own settings, by a name of your choice. All other parameters form the group
    `others`."""
    weight_decay_on: DecayOn
    """`matrices` applies weight decay to parameters with two or more dimensions only, not to biases, norms and other
    vectors; `all` applies it to everything."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None
    """Learning rate of each layer as a multiple of that of the next layer: below 1, layers learn the more slowly the
    nearer they are to the input. By default all have the same."""
    layers: str | None
    """Name of the module list that `layer_decay` counts, such as "encoder.blocks"."""

    @property
    def is_divided(self) -> bool:
        return bool(self.groups) or self.weight_decay_on != "all" or self.layer_decay is not None


class FailuresTable(Section, of=options.Failures):
    """What to do when something goes wrong. `docs/failures.md` says exactly what each choice does."""

    non_finite: options.NonFinite
    """For a loss or gradient that is inf or NaN, which is never applied: `stop` ends the run; `skip` leaves this global
    batch out; `retry` tries it once more; `rewind` goes back to the last checkpoint; `rewind_past` also leaves out the
    data since then."""
    out_of_memory: options.OutOfMemory
    """For a micro-batch that does not fit into memory: `retry` cuts it in two until it fits, which gives the same
    gradient; `stop` ends the run."""
    loss_spike: options.LossSpike
    """For a loss far above the previous ones: `ignore`, `report`, `stop`, `rewind` to the last checkpoint, or
    `rewind_past`, which also leaves out the data since then."""
    spike_window_updates: Annotated[int, Field(ge=8)]
    """How many previous updates a loss is compared with to find spikes."""
    spike_threshold: Positive
    """How many robust standard deviations above the median of those updates counts as a spike."""
    max_rewinds: Count
    """How many times a run may go back to a checkpoint before it stops."""
    loader: Literal["stop", "skip"] = "stop"
    """For a sample that still can't be read after `loader_retries`: `stop` ends the run, `skip` leaves it out; the loss
    is then divided by the remaining weight."""
    loader_retries: Natural = 2
    """How many times to read a sample again."""
    max_skipped_samples: Natural
    """How many samples may be left out before the run stops."""
    hook: options.HookFailure
    """For a hook that raises an error: `stop` ends the run, `continue` goes on without what the hook was about to
    do."""
    lost_rank: Literal["stop", "continue"] = "stop"
    """When one of several ranks dies: `stop` ends the run; `continue` divides the update among the remaining ranks, and
    takes the lost one back when it returns (on CPUs, with strategy ddp, and the extra `torchft`)."""


class MemoryTable(Section, of=options.Memory):
    """Ways to need less memory on the device. They do not change the result of an update."""

    checkpoint: str
    """Activation checkpointing: modules whose activations are recomputed in the backward instead of kept. `none`,
    `blocks` for the model's repeated blocks, or a pattern of module names such as `encoder.layers.*`."""
    empty_cache_every_updates: Count | None
    """Call `torch.cuda.empty_cache()`, or its equivalent, after every this many updates. Never by default."""


class EmaTable(Section, of=Ema):
    """Keeps an exponential moving average (EMA) of the parameters, and evaluates it."""

    decay: Annotated[float, Field(ge=0, lt=1)]
    """Share of the old average that is kept in each step, such as 0.999."""
    start_update: Natural
    """Averaging begins at this update; until then the average equals the parameters."""
    every_updates: Count
    """Update the average after every this many updates."""
    decay_warmup: bool
    """Limit the decay of the n-th step to (1 + n) / (10 + n), so that the initial parameters are forgotten quickly."""
    evaluated: Evaluated
    """What to evaluate: the average, the parameters, or both. With both, the metrics of the parameters are called
    `valid/parameters/loss` and so on."""


class LimitTable(Section):
    """Use only a part of the data, to try a run out."""

    batches: Count | None = None
    """Use only this many global batches of each epoch, and this many batches of each evaluation. All by default."""


class Config(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run. Its folder is `<runs>/<name>`."""
    runs: str = "runs"
    """Folder that holds the folders of runs, relative to the working directory."""
    recipe: str = "."
    """Folder of the recipe's Python files, relative to this file. A run keeps a copy of them in its `recipe` folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = default_of(Trainer, "seed")
    """Seed of everything random: initial parameters, order of the data, dropout."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = default_of(Trainer, "device")
    """Device to compute on: auto, cpu, cuda, cuda:N or mps. auto uses an accelerator if there is one."""
    threads: Count | None = None
    """Number of threads of torch's CPU operators. By default torch decides."""
    resume: str = "never"
    """What to start from: `never` for a new run, `auto` for the newest valid checkpoint in the run folder, if any, or
    the path of a checkpoint or run folder."""
    reset: ResetWords = ()
    """What to start afresh although `resume` names a checkpoint: `optimizer`, `lr_schedule`, `metrics`, `data`, as a
    list or separated by commas. The update count continues."""
    model: TargetTable
    """The model: a callable that returns a `torch.nn.Module`."""
    init_from: InitFromTable | None = None
    """Weights to start with. By default the model keeps its own initial weights."""
    task: OneTaskTable | None = None
    """The task: a callable that returns an `evenstep.Task`. Give either this and `data`, or `tasks`."""
    data: DataTable | None = None
    """Training and evaluation data, and how batches are made of them."""
    tasks: dict[str, NamedTaskTable] = Field(default_factory=dict)
    """Several tasks that are trained together, by name, each with its own data."""
    mixture: MixtureTable | None = None
    """How batches of several tasks are combined into updates. By default each update takes a batch of every task."""
    coefficients: CoefficientsTable | None = None
    """How the losses of several tasks are weighted. By default each task's own `coefficient`."""
    combine: CombineTable | None = None
    """How the gradients of several tasks are combined. By default they are added up."""
    train: TrainTable
    """How long to train, and how each update is computed."""
    loss_scale: LossScaleTable | None = None
    """Dynamic loss scaling, only for the precisions 16-mixed, 16-true and 16-true-no-master."""
    float8: Float8Table | None = None
    """Which layers compute in float8, only for precision float8-mixed."""
    optimizer: OptimizerTable
    """The optimizer and its parameter groups."""
    lr_schedule: LrScheduleTable = TABLES["constant"]()
    """How the learning rate changes during the run."""
    parallel: ParallelTable = ParallelTable.empty()
    """How several processes (ranks) share the model and its gradients."""
    launch: LaunchTable = LaunchTable()
    """How many processes to start."""
    failures: FailuresTable = FailuresTable.empty()
    """What to do when something goes wrong."""
    memory: MemoryTable = MemoryTable.empty()
    """Ways to need less memory on the device."""
    ema: EmaTable | None = None
    """An exponential moving average of the parameters. None by default."""
    evaluate: EvaluateTable = EvaluateTable.empty()
    """When to evaluate."""
    checkpoint: CheckpointTable = CheckpointTable.empty()
    """When to save, and what to keep."""
    early_stop: EarlyStopTable | None = None
    """When to stop before the end of the run. Never by default."""
    log: LogTable = LogTable.empty()
    """Which metrics are shown and written, and how often."""
    limit: LimitTable = LimitTable()
    """Use only a part of the data, to try a run out. All by default."""
    overfit: Count | None = None
    """Train and evaluate on the first this many samples of the training set only, again and again, to see whether the
    model can learn them."""
    profile: Annotated[ProfileTable | None, BeforeValidator(updates_in)] = None
    """Updates to profile into the run folder, such as `10:13`. None by default."""
    hooks: Annotated[tuple[TargetTable, ...], Field(strict=False)] = ()
    """Additional hooks: callables that return an `evenstep.Hook`."""
