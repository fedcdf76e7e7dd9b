"""A run file: every key with its type, range, default and text.

Tables that a trainer takes are its option classes. The classes here are of what a file alone has.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, cast

from annotated_types import Ge, Lt
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from evenstep.config.target import bind, find
from evenstep.data.loader import Reading
from evenstep.data.mixture import AllTasks, End, Mixing
from evenstep.errors import ArgumentError, PlanError
from evenstep.optim.groups import DecayOn, ParameterGroup
from evenstep.optim.schedules import AnySchedule, Constant
from evenstep.options import (
    STANDARD_WRITERS,
    Checkpointing,
    Evaluation,
    Failures,
    Logging,
    Reset,
    Training,
    Writer,
    WriterName,
    check_length,
)
from evenstep.parallel.blocks import BLOCKS
from evenstep.precision import Precision
from evenstep.schema import Count, Matching, Natural, OneOf, Positive, option

Names = tuple[str, ...]
Pairs = tuple[tuple[Count, Count], ...]


def _found(target: str, info: ValidationInfo) -> Any:
    return find(target, cast("Any", info.context)["recipe"])


def _bound(args: dict[str, Any], info: ValidationInfo, **given: Any) -> dict[str, Any]:
    function = next((info.data[name] for name in ("target", "name", "use") if info.data.get(name)), None)
    return bind(function, args, cast("Any", info.context)["paths"], **given) if callable(function) else args


def _hook(name: str, info: ValidationInfo) -> Any:
    return _found(f"evenstep.events:{name.title().replace('_', '')}", info)


Function = Annotated[
    Callable[..., Any],
    Matching(r"[^:]+:[A-Za-z_][A-Za-z0-9_.]*", "FILE.py:NAME or package.module:NAME"),
    AfterValidator(_found),
]
TorchOptimizer = Annotated[
    Callable[..., Any],
    Matching(r"\w+", "a class of torch.optim"),
    AfterValidator(lambda name, info: _found(f"torch.optim:{name}", info)),
]
HookName = Literal[
    "best", "early_stop", "profile", "statistics", "stop_below_lr", "stop_file", "time_budget", "timer", "watchdog"
]
Args = Annotated[dict[str, Any], AfterValidator(_bound), Field(validate_default=True)]
OptimizerArgs = Annotated[
    dict[str, Any],
    AfterValidator(lambda args, info: _bound(args, info, num_given=1, without=("lr",))),
    Field(validate_default=True),
]
AnyMixing = OneOf("evenstep.data.mixture:Mixing", "evenstep.data.mixture:MIXINGS", default="all")
AnyPrecision = OneOf("evenstep.precision:Precision", "evenstep.precision:PRECISIONS", named=True)


def _with_args(table: Any) -> Any:
    """A hook's table with its further keys among its arguments."""
    if not isinstance(table, dict):
        return cast("object", table)
    given = cast("dict[str, Any]", table)
    own = {name: value for name, value in given.items() if name in ("use", "target", "args")}
    rest = {name: value for name, value in given.items() if name not in own}
    return own | {"args": own.get("args", {}) | rest} if rest and isinstance(own.get("args", {}), dict) else own


def _split(value: Any) -> Any:
    given = value.split(",") if isinstance(value, str) else value
    return tuple(given) if isinstance(given, list) else given


@option
class Target:
    """A Python object to call, and its arguments."""

    target: Function
    """`FILE.py:NAME` with the file relative to the recipe's folder, or `package.module:NAME`."""
    args: Args = field(default_factory=dict[str, Any])
    """Keyword arguments. A relative path counts from the run file's folder, if the parameter is a `Path`."""

    def __call__(self) -> Any:
        return self.target(**self.args)


@option
class HookTable:
    """A hook of evenstep by name, or a callable with its arguments."""

    extra: ClassVar[str] = "allow"

    use: Annotated[HookName, AfterValidator(_hook)] | None = None
    """Name of a hook of evenstep. Its arguments are further keys of this table."""
    target: Function | None = None
    """`FILE.py:NAME` or `package.module:NAME`: a callable that returns an `evenstep.Hook`."""
    args: Args = field(default_factory=dict[str, Any])
    """Keyword arguments of `target`."""

    def __post_init__(self) -> None:
        if (self.use is None) == (self.target is None):
            raise ArgumentError("give one of `use` and `target`.", field="target")

    def __call__(self) -> Any:
        return cast("Any", self.target or self.use)(**self.args)


@option
class EvaluationSet(Target):
    """A dataset to evaluate the model on."""

    micro_batch_size: Count | None = None
    """Samples per forward pass in this evaluation. By default the one of training."""
    first_batches: Count | None = None
    """Evaluate only the first this many batches of `micro_batch_size` samples. All by default."""


@option
class DataTable:
    """Training and evaluation data, and how batches are made of them."""

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"evaluations", "micro_batch_size", "micro_batch_tokens", "num_workers", "reading"}
    )

    train: Target
    """The training set: a callable that returns a map-style dataset, or a stream (an iterable without a length)."""
    evaluations: dict[str, EvaluationSet] = field(default_factory=dict[str, EvaluationSet])
    """The evaluation sets. Their names begin the names of their metrics: `valid` gives `valid/loss`."""
    global_batch_size: Count | Pairs | None = None
    """Samples of one update, over all ranks; or pairs of an update and a size from there on: [[1, 64], [1000, 128]].
    Give either this or `global_batch_tokens`."""
    global_batch_tokens: Count | None = None
    """Most tokens of one update, padding included: the number of samples times the longest one."""
    micro_batch_size: Count | None = None
    """Samples that go through forward and backward at once. By default each rank's share of the global batch, which is
    cut until it fits into memory."""
    micro_batch_tokens: Count | None = None
    """Most tokens of one micro-batch, padding included."""
    packed: bool = False
    """`collate` packs samples without padding: the tokens of a batch are the sum over its samples."""
    shuffle: bool = True
    """Shuffle each epoch, in an order that depends only on the seed and the epoch."""
    num_workers: Natural = 0
    """Processes that load data, as in a `DataLoader`. 0 loads in the training process."""
    reading: Reading = Reading()
    """Reading of samples: waiting, repeating, leaving out."""
    collate: Function | None = None
    """`FILE.py:NAME` or `package.module:NAME`: makes a batch from a list of samples. By default as a `DataLoader`."""
    shared: bool = False
    """Streams only: all ranks read the same stream, and each uses its part of every batch."""

    def __post_init__(self) -> None:
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ArgumentError("give one of `global_batch_size` and `global_batch_tokens`.", field="global_batch_size")


@option
class InitFrom:
    """Weights to start the run with, trained elsewhere. To continue a run, use `resume` instead."""

    path: str
    """A run folder or a checkpoint; a `.safetensors` file, the index of a sharded one, or a folder with either; or a
    file written by `torch.save`, of which only tensors are read."""
    only: Names = ("*",)
    """Patterns of parameter names to load, such as `encoder.*`; others keep their initial values. All by default."""
    average: bool = False
    """Load the moving average (EMA) of the parameters instead of the parameters."""
    partial: bool = False
    """Allow missing, additional or differently shaped weights: what fits is loaded, and the rest is listed."""


@option
class TaskTable(Target):
    """The task: which inputs the model gets from a batch, and how the loss is computed."""

    metrics: dict[str, Target] = field(default_factory=dict[str, Target])
    """More metrics, by name: classes of `torchmetrics`, which get what the task's `loss` returns as `observed`."""


@option
class NamedTask(TaskTable):
    """A task beside others, with its own data."""

    data: DataTable
    """Training and evaluation data of this task."""


@option
class MixtureTable:
    """Updates from batches of several tasks."""

    mixing: Annotated[Mixing, AnyMixing] = AllTasks()
    """Tasks of each update. `all`: a batch of every task, or as many as `repeats` says. `round_robin`: one after the
    other. `sampled`: drawn at random."""
    end: End = "cycle"
    """When an epoch ends: `min` as soon as one task has used up its data; `max` and `cycle` when all have, where the
    tasks that finish earlier pause (`max`) or start over (`cycle`)."""


@option
class TrainTable(Training):
    """Length of the run, and options of its updates."""

    may_change: ClassVar[frozenset[str]] = Training.may_change | {"updates", "epochs"}

    updates: Count | None = None
    """Length of the run, in updates (optimizer steps). Give either this or `epochs`."""
    epochs: Count | None = None
    """Length of the run in epochs of the training set."""
    precision: Annotated[Precision | str, AnyPrecision] = "32-true"
    """Number formats. `32-true` is float32 throughout; `-mixed` keeps float32 parameters and computes in the smaller
    format; `-true` also keeps the model in that format, with float32 master weights in the optimizer; `-no-master` does
    without those. A table of `kind` and arguments sets the loss scale, the casts, or the layers in float8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.updates, self.epochs)


@option
class GroupTable(ParameterGroup):
    """Settings of some of the model's parameters."""

    not_in_files: ClassVar[frozenset[str]] = frozenset({"optimizer", "options"})

    name: TorchOptimizer | None = None
    """Another optimizer for this group: a class of `torch.optim`, such as `Muon`. By default the one of `optimizer`."""
    target: Function | None = None
    """Another optimizer for this group, as `FILE.py:NAME` or `package.module:NAME`."""
    args: OptimizerArgs = field(default_factory=dict[str, Any])
    """Additional keyword arguments of that optimizer."""
    lr_schedule: AnySchedule | None = None
    """LR schedule of this group. By default the run's `lr_schedule`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", self.target or self.name)
        object.__setattr__(self, "options", self.args)


@option
class OptimizerTable:
    """The optimizer and its parameter groups."""

    name: TorchOptimizer | None = None
    """A class of `torch.optim`, such as `AdamW`. Give either this or `target`."""
    target: Function | None = None
    """`FILE.py:NAME` or `package.module:NAME`: an optimizer class, or a function of the model that returns one."""
    lr: Positive
    """Learning rate, which `lr_schedule` multiplies."""
    args: OptimizerArgs = field(default_factory=dict[str, Any])
    """Additional keyword arguments of the optimizer, such as `weight_decay`."""
    groups: Mapping[str, GroupTable] = field(default_factory=dict[str, GroupTable])
    """Parameter groups with their own settings, by name. All other parameters form the group `others`."""
    weight_decay_on: DecayOn = "all"
    """`matrices` applies weight decay to parameters with two or more dimensions only, not to biases, norms and other
    vectors; `all` applies it to everything."""

    def __post_init__(self) -> None:
        if (self.name is None) == (self.target is None):
            raise ArgumentError("give one of `name` and `target`.", field="name")

    @property
    def is_divided(self) -> bool:
        return bool(self.groups) or self.weight_decay_on != "all"


@option
class ParallelTable:
    """Division of the model and its gradients between several processes (ranks)."""

    strategy: Literal["auto", "single", "ddp", "fsdp", "zero1"] = "auto"
    """`single`: one process. `ddp`: each rank has the whole model. `fsdp`: parameters, gradients and optimizer state
    are sharded. `zero1`: the whole model on each rank, optimizer state sharded. `auto`: ddp if there are several
    ranks."""
    shard_ranks: Count | None = None
    """Strategy fsdp: number of neighbouring ranks that share one copy of the parameters (hybrid sharding). By default
    all ranks."""
    reduction: Literal["ordered", "fast"] = "ordered"
    """How gradients are added: `ordered` in blocks and a fixed tree, with the same bits on any number of ranks;
    `fast` in the backend's order."""
    blocks: Count = BLOCKS
    """Blocks of micro-batches, B, in which ordered gradients are added. The bits depend on it. R ranks hold at most
    log₂(B/R) further sets of gradients, none where B ≤ R; an even number of blocks for each rank is best."""
    timeout_s: Positive = 60.0
    """Seconds to wait for another rank before it counts as lost."""
    pipeline: Count = 1
    """Number of ranks that the model is divided among as pipeline stages. 1 is no pipeline."""
    pipeline_schedule: Literal["sequential", "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v"] = "1f1b"
    """Order in which stages compute their micro-batches. `evenstep plan` compares all of them."""
    stages_per_rank: Count | None = None
    """Pipeline stages on each rank. By default as few as the pipeline schedule allows."""
    split_at: Names = ()
    """Names of the layers at which the second and later stages begin. By default stages have equally many layers."""

    def __post_init__(self) -> None:
        if self.strategy != "fsdp" and self.shard_ranks is not None:
            raise ArgumentError(f'needs `parallel.strategy` fsdp, but that is "{self.strategy}".', field="shard_ranks")
        if self.pipeline == 1 and (self.stages_per_rank is not None or self.split_at):
            field = "split_at" if self.stages_per_rank is None else "stages_per_rank"
            raise ArgumentError("needs `parallel.pipeline` 2 or more, but that is 1.", field=field)
        if self.pipeline > 1:
            from evenstep.pipeline import SCHEDULES

            try:
                SCHEDULES[self.pipeline_schedule].layout(self.pipeline, self.stages_per_rank)
            except PlanError as error:
                raise ArgumentError(f"does not fit its schedule: {error}", field="stages_per_rank") from None


@option
class SlurmTable:
    """Submit the run as a SLURM job with one task per rank. Needs the extra `slurm`."""

    nodes: Count = 1
    """Number of machines."""
    ranks_per_node: Count = 1
    """Processes on each machine, with one accelerator each if there are any."""
    timeout_minutes: Count = 60
    """Time limit of the job, in minutes. 90 s before it, the run saves and the job is queued again."""
    additional: dict[str, Any] = field(default_factory=dict[str, Any])
    """Additional options of `sbatch`, such as `partition`, `account`, `cpus_per_task` or `gpus_per_node`."""


@option
class LaunchTable:
    """Processes that `evenstep train` starts on this machine; for several machines use torchrun or `slurm`."""

    ranks: Count = 1
    """Processes to start, with one accelerator each if there are any. At least one per pipeline rank."""
    slurm: SlurmTable | None = None
    """Submit the run as a SLURM job instead of starting it here. Not by default."""
    max_restarts: Natural = 0
    """How many times to start all ranks again, or with `lost_rank` continue a lost one, after one has failed."""
    lost_rank: Literal["stop", "continue"] = "stop"
    """When one of several ranks dies: `stop` ends the run; `continue` divides the update among the remaining ranks, and
    takes the lost one back when it returns (on CPUs, with strategy ddp, and the extra `torchft`)."""


@option
class LogTable(Logging):
    """Metrics to show and to write."""

    writers: tuple[WriterName | Target | Writer, ...] = STANDARD_WRITERS  # type: ignore[assignment]
    """Where metrics go: names of writers, or tables with the `target` and the `args` of an `evenstep.Writer`."""


@option
class RunConfig:
    """A whole run."""

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"device", "threads", "recipe", "hooks", "evaluation", "checkpoint", "log", "parallel", "launch", "failures"}
    )

    name: Annotated[
        str,
        Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "of a-z, A-Z, 0-9, `.`, `_` and `-`, and begin with a letter or digit"),
    ]
    """Name of the run. Its folder is `<runs>/<name>`."""
    runs: str = "runs"
    """Folder that holds the folders of runs, relative to the working directory."""
    recipe: str = "."
    """Folder of the recipe's Python files, relative to this file. A run keeps a copy of them in its `recipe` folder."""
    paths: str = "."
    """Folder that relative paths in `args` count from, relative to this file. A run keeps where it was."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 42
    """Seed of everything random: initial parameters, order of the data, dropout."""
    device: Annotated[str, Matching(r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, mps, cuda or cuda:N")] = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:N or mps. auto uses an accelerator if there is one."""
    threads: Count | None = None
    """Number of threads of torch's CPU operators. By default torch decides."""
    resume: str = "never"
    """Beginning of the run: `never` for a new run, `auto` for the newest valid checkpoint in the run folder, if any, or
    the path of a checkpoint or run folder."""
    reset: Annotated[tuple[Reset, ...], BeforeValidator(_split)] = ()
    """Parts of the checkpoint that `resume` names not to load, as a list or separated by commas. The update count
    continues."""
    model: Target
    """The model: a callable that returns a `torch.nn.Module`."""
    init_from: InitFrom | None = None
    """Weights to start with. By default the model keeps its own initial weights."""
    task: TaskTable | None = None
    """The task: a callable that returns an `evenstep.Task`. Give either this and `data`, or `tasks`."""
    data: DataTable | None = None
    """Training and evaluation data, and how batches are made of them."""
    tasks: dict[str, NamedTask] = field(default_factory=dict[str, NamedTask])
    """Several tasks that are trained together, by name, each with its own data."""
    mixture: MixtureTable = MixtureTable()
    """How batches of several tasks are combined into updates. By default each update takes a batch of every task."""
    train: TrainTable
    """Length of the run, and options of its updates."""
    optimizer: OptimizerTable
    """The optimizer and its parameter groups."""
    lr_schedule: AnySchedule = Constant()
    """How the learning rate changes during the run."""
    parallel: ParallelTable = ParallelTable()
    """How several processes (ranks) share the model and its gradients."""
    launch: LaunchTable = LaunchTable()
    """How many processes to start."""
    failures: Failures = Failures()
    """Policies for faults."""
    evaluation: Evaluation = Evaluation()
    """When to evaluate on `data.evaluations`."""
    checkpoint: Checkpointing = Checkpointing()
    """When to save, and what to keep."""
    log: LogTable = LogTable()
    """Metrics to show and to write."""
    limit_batches: Count | None = None
    """To try a run out: use only this many batches of each epoch and of each evaluation. All by default."""
    hooks: tuple[Annotated[HookTable, BeforeValidator(_with_args)], ...] = ()
    """Hooks: evenstep's by name, or callables that return an `evenstep.Hook`. On the command line
    `--hooks.time_budget.max_minutes 55` sets an argument of the hook with this name, and adds the hook if need be."""

    @property
    def sets(self) -> dict[str, DataTable]:
        """Every table of data by its key: `data`, or `tasks.NAME.data`."""
        own = {} if self.data is None else {"data": self.data}
        return own | {f"tasks.{name}.data": task.data for name, task in self.tasks.items()}

    def faults(self) -> Iterator[str]:
        """Faults between tables, each with its key."""
        for key, given in (("task", self.task), ("data", self.data)):
            if (given is None) != bool(self.tasks):
                yield f"`{key}`: give `task` and `data` for one task, or tables `[tasks.NAME]` for several."
        if self.evaluation != Evaluation() and not any(table.evaluations for table in self.sets.values()):
            yield "`evaluation` has nothing to evaluate on; add a table `[data.evaluations.valid]`."
        if self.reset and self.resume in ("never", "auto"):
            yield f'`reset` needs `resume = PATH`, but `resume` is "{self.resume}"; name the checkpoint.'
        slurm = self.launch.slurm
        pipeline = self.parallel.pipeline
        ranks = self.launch.ranks if slurm is None else slurm.nodes * slurm.ranks_per_node
        if ranks > 1 and ranks % pipeline:
            yield f"`launch.ranks` must be a multiple of the {pipeline} pipeline ranks, but is {ranks}."
        if self.launch.lost_rank == "continue" and (
            self.parallel.strategy in ("fsdp", "zero1")
            or self.parallel.pipeline > 1
            or any(str(one).startswith("rewind") for one in (self.failures.non_finite, self.failures.loss_spike))
        ):
            yield (
                '`launch.lost_rank` "continue" is for strategy ddp without a pipeline, and without policies that '
                'rewind; use "stop".'
            )
