"""Builds a run: what its file names is called in a fixed order and from seeded generators.

So the same file gives the same initial parameters. Nothing is trained here, and no file is written.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast, final

import numpy as np
import torch
from torch import nn

from evenstep.checkpoint import read_checkpoint
from evenstep.checkpoint.weights import StoredWeights, own_weights
from evenstep.config.load import refused_at
from evenstep.config.run import DataTable, EvaluationSet, RunConfig, Target
from evenstep.data import Data, GlobalBatch, MapData, Mixture, ReadOptions, StreamData
from evenstep.data.batching import largest
from evenstep.data.seeding import undisturbed
from evenstep.errors import ArgumentError, TaskError
from evenstep.events import Hook, Writer
from evenstep.optim.groups import grouped_optimizer
from evenstep.optim.optimizers import NO_FUSED_SHARDS, joined, parts_of, set_mode
from evenstep.optim.schedules import Constant, LrSchedule, PerGroup
from evenstep.options import Checkpointing, Evaluation, Failures, WriterName
from evenstep.parallel import Group, Mesh, Strategy, device_of_rank, strategy_named
from evenstep.pipeline import Layers, PipelineModel
from evenstep.tensors import TASK_PARAMETERS, load_state, named_parameters
from evenstep.train import LoadedWeights, Task, Trainer
from evenstep.train.state.loading import load_weights
from evenstep.train.state.optimizer_state import check_optimizer, load_optimizer, options_of, parameter_names
from evenstep.train.tasks.tasks import attach_modules
from evenstep.train.update.microbatch import build_transfer

_Made = TypeVar("_Made")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts of a run, its model on the CPU; `loaded` are weights that it begins with."""

    config: RunConfig
    model: nn.Module
    task: Task | Mapping[str, Task]
    optimizer: torch.optim.Optimizer
    data: Data
    evaluations: Mapping[str, Data]
    hooks: Sequence[Hook]
    writers: Sequence[Writer | WriterName]
    loaded: LoadedWeights | None = None
    strategy: Strategy | None = None

    def trainer(
        self,
        *,
        hooks: Sequence[Hook] = (),
        writers: Sequence[Writer | WriterName] = (),
        folder: Path | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> Trainer:
        """Build the trainer, whose checkpoints keep `kept`."""
        config = deepcopy(self.config)  # some objects in it keep the state of one run
        with refused_at("train"):
            return Trainer(
                model=self.model,
                task=self.task,
                optimizer=self.optimizer,
                data=self.data,
                evaluations=self.evaluations,
                strategy=self.strategy,
                updates=config.train.updates,
                epochs=config.train.epochs,
                seed=config.seed,
                device=device_of_rank(config.device),
                precision=config.train.precision,
                lr_schedule=build_lr_schedule(config),
                hooks=hooks,
                folder=folder,
                train=config.train,
                evaluation=config.evaluation,
                checkpoint=replace(Checkpointing() if folder is None else config.checkpoint, config=kept),
                failures=config.failures,
                log=replace(config.log, writers=tuple(writers)),
            )

    def for_trial(self) -> "RunParts":
        """The same with an evaluation at each update, and without policies that need checkpoints."""
        return replace(self, config=replace(self.config, failures=Failures(), evaluation=Evaluation(every_updates=1)))

    def first_inputs(self, device: torch.device) -> tuple[GlobalBatch, Any]:
        """The first global batch, and the model's inputs of its first micro-batch, on `device`."""
        with closing(cast("Any", self.data.batches(ReadOptions(seed=self.config.seed)))) as batches:
            batch: GlobalBatch = next(batches)
        first = batch.microbatches[0]
        task = self.task if isinstance(self.task, Task) else self.task[first.task]
        transfer = build_transfer(device)
        return batch, task.inputs(task.transform(first.data if transfer is None else transfer(first.data)))

    def close(self) -> None:
        """End the processes that load data."""
        for data in (self.data, *self.evaluations.values()):
            data.close()


def build_lr_schedule(config: RunConfig) -> LrSchedule | None:
    """The LR schedule of a run; None where nothing multiplies the rates, so that hooks may set them."""
    groups = config.optimizer.groups.items()
    own: dict[str | int, LrSchedule] = {
        name: deepcopy(group.lr_schedule) for name, group in groups if group.lr_schedule is not None
    }
    whole = deepcopy(config.lr_schedule)
    if own:
        return PerGroup(own, whole)
    return None if whole == Constant() else whole


def build_parts(config: RunConfig, group: Group | None = None, *, begins: bool = True) -> RunParts:
    """Call everything that an open run names; torch has the run's number of threads from here on.

    Args:
        group: the ranks of the run; None to run all stages in this process, one after the other.
        begins: False for a run that goes on, whose model does not take the weights that it once began with.

    Raises:
        ConfigError: data and their settings that don't fit each other, or an argument that a target refuses.
        TaskError: a target that gives something else than it must.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    parallel = config.parallel
    with refused_at("parallel.pipeline"):
        mesh = None if group is None else Mesh.of(group, pipeline=parallel.pipeline)
    model = build_model(config, mesh)
    loaded = None
    if begins and config.init_from is not None:
        with refused_at("init_from.path"):
            loaded = load_weights(model, **vars(config.init_from))
    hooks, task = prepared(config, model)
    optimizer = make_optimizer(config, model)
    data, evaluations = build_sets(config)
    options: dict[str, Any] = {name: getattr(parallel, name) for name in ("reduction", "blocks", "shard_ranks")}
    return RunParts(
        config=config,
        model=model,
        task=task.get("", task),
        optimizer=optimizer,
        data=data,
        evaluations=evaluations,
        hooks=hooks,
        writers=[
            _make(config, f"log.writers.{index}", one, Writer) if isinstance(one, Target) else one
            for index, one in enumerate(config.log.writers)
        ],
        loaded=loaded,
        strategy=None if mesh is None else strategy_named(parallel.strategy, mesh.data, **options),
    )


def prepared(config: RunConfig, model: nn.Module) -> tuple[list[Hook], dict[str, Task]]:
    """The hooks, which may have changed layers, and the tasks by name, whose parameters are part of the model now."""
    hooks = [_make(config, f"hooks.{index}", one, Hook) for index, one in enumerate(config.hooks)]
    for hook in hooks:
        hook.prepare(model)
    tables = config.tasks if config.task is None else {"": config.task}
    tasks: dict[str, Task] = {}
    for name, table in tables.items():
        key = f"tasks.{name}" if name else "task"
        task = tasks[name] = _make(config, key, table, Task)
        own = {metric: _make(config, f"{key}.metrics.{metric}", one, object) for metric, one in table.metrics.items()}
        task.metrics = {**task.metrics, **own}
    attach_modules(model, tasks)
    return hooks, tasks


def _make(config: RunConfig, key: str, table: Callable[[], object], kind: type[_Made]) -> _Made:
    with undisturbed(), refused_at(key):
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.default_generator.manual_seed(config.seed)
        made = table()
    return _checked(key, made, kind)


def _checked(key: str, made: object, kind: type[_Made]) -> _Made:
    if not isinstance(made, kind):
        raise TaskError(f"`{key}.target` must give a `{kind.__name__}`, but gave a {type(made).__name__}.", field=key)
    return made


def make_model(config: RunConfig) -> nn.Module | Layers:
    """The model as its target gives it, its parameters drawn from the run's seed."""
    made = _make(config, "model", config.model, object)
    return made if isinstance(made, Layers) else _checked("model", made, nn.Module)


def build_model(config: RunConfig, mesh: Mesh | None) -> nn.Module:
    """The model as it is trained: whole, or in stages where the run file asks for a pipeline."""
    made, parallel = make_model(config), config.parallel
    if parallel.pipeline == 1 and isinstance(made, nn.Module):
        return made
    with refused_at("parallel.pipeline"):
        return PipelineModel(
            made,
            mesh=mesh,
            schedule=parallel.pipeline_schedule,
            stages_per_rank=None if mesh is None else parallel.stages_per_rank,
            split_at=parallel.split_at or None,
            seed=config.seed,
        )


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the model's parameters, in groups where the run has some.

    A class is called with the trained parameters, any other callable with the model. A class of `torch.optim` that can
    do its work in one fused kernel is told to: loss scale, clipping and the check for finite gradients then cost
    nothing extra. On a CPU the bits of a fused step depend on how tensors are sharded, so ordered shards are not fused.
    """
    table = config.optimizer
    kind: Any = table.target or table.name
    given = {one.optimizer: one.options for one in table.groups.values() if one.optimizer} | {kind: table.args}
    fused = {each: _fused(config, each, args, model) for each, args in given.items()}
    with refused_at("optimizer"):
        if table.is_divided:
            if not isinstance(kind, type):
                raise ArgumentError("`target` must name a class, as there are groups, but names a function.")
            return grouped_optimizer(
                model,
                kind,
                lr=table.lr,
                groups=table.groups,
                weight_decay_on=table.weight_decay_on,
                options=table.args,
                options_of=fused,
            )
        if isinstance(kind, type):
            made = cast("torch.optim.Optimizer", kind(_groups(model), lr=table.lr, **table.args, **fused[kind]))
        else:
            made = joined(kind(model, lr=table.lr, **table.args))
    for one in parts_of(made):
        _checked("optimizer", one, torch.optim.Optimizer)
    return made


def _groups(model: nn.Module) -> list[Any]:
    own, of_tasks = list[nn.Parameter](), list[nn.Parameter]()
    for name, one in named_parameters(model).items():
        if one.requires_grad:
            (of_tasks if name.startswith(f"{TASK_PARAMETERS}.") else own).append(one)
    if of_tasks:
        return [{"params": own}, {"params": of_tasks}]
    # a rank of a pipeline may have nothing to train, which optimizers take as an empty group only
    return own or [{"params": []}]


def _fused(config: RunConfig, kind: Any, args: Mapping[str, Any], model: nn.Module) -> dict[str, bool]:
    shards = config.parallel.strategy == "fsdp"
    if shards and config.parallel.reduction == "ordered" and device_of_rank(config.device).type == "cpu":
        return {}
    can = kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and not (shards and kind in NO_FUSED_SHARDS)
    decided = {"fused", "foreach", "capturable", "differentiable"} & args.keys()
    dense = all(
        one.is_floating_point() and torch.empty_like(one).stride() == one.stride() for one in model.parameters()
    ) and not any(getattr(module, "sparse", False) for module in model.modules())
    return {"fused": True} if can and dense and not decided else {}


def build_sets(config: RunConfig) -> tuple[Data, dict[str, Data]]:
    """The training data, mixed if there are several tasks, and the evaluation sets by name. No sample is read."""
    train: dict[str, Data] = {}
    evaluations: dict[str, dict[str, Data]] = {}
    for key, table in config.sets.items():
        task = key.removeprefix("tasks.").removesuffix(".data")
        dataset = _make(config, f"{key}.train", table.train, object)
        with refused_at(f"{key}.train"):
            train[task] = _build_data(table, dataset)
        for name, evaluation in table.evaluations.items():
            dataset = _make(config, f"{key}.evaluations.{name}", evaluation, object)
            with refused_at(f"{key}.evaluations.{name}"):
                evaluations.setdefault(name, {})[task] = _build_evaluation(evaluation, table, dataset)
    if config.tasks:
        with refused_at("mixture"):
            data: Data = Mixture(train, mixing=config.mixture.mixing, end=config.mixture.end)
        sets: dict[str, Data] = {name: Mixture(some, end="max") for name, some in evaluations.items()}
    else:
        data = train["data"]
        sets = {name: some["data"] for name, some in evaluations.items()}
    limit = config.limit_batches
    if limit is not None:
        for one in (data, *sets.values()):
            one.limit_batches = min(limit, one.limit_batches or limit)
    return data, sets


def _build_data(table: DataTable, dataset: Any) -> Data:
    """The training set, as a map-style dataset or, where it has no length, as a stream."""
    kind = StreamData if _is_stream(dataset) else MapData
    own = {one.name: one.default for one in fields(table) if one.name not in ("train", "evaluations")}
    options = {name: getattr(table, name) for name, default in own.items() if getattr(table, name) != default}
    unused = options.keys() - signature(kind).parameters
    if unused:
        raise ArgumentError(f"`{min(unused)}` has no effect on a {kind.__name__}; leave it out.")
    if kind is MapData:
        options["lengths"] = _lengths(dataset, table)
    return kind(dataset, **options)


def _build_evaluation(evaluation: EvaluationSet, table: DataTable, dataset: Any) -> Data:
    """An evaluation set: in its own order, a micro-batch at a time; nothing is left out."""
    size = evaluation.micro_batch_size or table.micro_batch_size
    if size is None and table.micro_batch_tokens is None:
        size = largest(table.global_batch_size)
    options: dict[str, Any] = {"global_batch_size": size, "limit_batches": evaluation.first_batches}
    if table.collate is not None:
        options["collate"] = table.collate
    if _is_stream(dataset):
        return StreamData(dataset, shared=table.shared, micro_batch_size=size if table.shared else None, **options)
    if size is None:
        options |= {
            "global_batch_tokens": table.micro_batch_tokens or table.global_batch_tokens,
            "lengths": _lengths(dataset, table),
            "packed": table.packed,
        }
    reading = replace(table.reading, skip_failing=False)
    options |= {"num_workers": table.num_workers, "reading": reading}
    return MapData(dataset, micro_batch_size=size, shuffle=False, **options)


def _is_stream(dataset: object) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")


def _lengths(dataset: Any, table: DataTable) -> Any:
    if table.global_batch_tokens is None and table.micro_batch_tokens is None:
        return None
    if not hasattr(dataset, "lengths"):
        raise ArgumentError(f"batches by tokens need `lengths` of the dataset ({type(dataset).__name__}); add it.")
    return dataset.lengths


def evaluated_weights(config: RunConfig, path: Path | str) -> StoredWeights:
    """Weights of a checkpoint as the run's optimizer evaluates them: schedule-free ones make them of their state."""
    reader = read_checkpoint(path)
    model = build_model(config, None)
    prepared(config, model)
    optimizer = make_optimizer(config, model)
    set_mode(optimizer, "train")  # as the saved one was
    groups = parameter_names(model, optimizer)
    saved = reader.state["optimizer"]
    check_optimizer(saved, optimizer, groups)
    load_state(model, reader.state["model"])
    set_mode(optimizer, "train")  # the mode of saved states
    load_optimizer(saved, optimizer, groups, options_of(optimizer))
    set_mode(optimizer, "eval")
    held = own_weights(model.state_dict(keep_vars=True))  # the tensors themselves: tied ones are one object
    return StoredWeights(
        source=f"{reader.path}, as evaluated", outlines=held, read=lambda name: held[name].detach(), verify=lambda: None
    )
