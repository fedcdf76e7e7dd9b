"""The parts of a run, built from its configuration, and the trainer that puts them together.

What the configuration names is called in a fixed order and from seeded generators, so the same configuration gives
the same initial parameters. Nothing is trained here, and no file is written.
"""

import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import numpy as np
import torch
from torch import nn

from evenstep.builders.data import build_data, build_evaluation, first_samples
from evenstep.builders.optimizer import build_grouped, build_optimizer
from evenstep.builders.options import build_checkpointing, build_failures, build_precision, build_training
from evenstep.builders.pipeline import build_model
from evenstep.builders.schedule import build_lr_schedule
from evenstep.builders.tasks import build_mixture
from evenstep.config.faults import refused_at
from evenstep.config.named import OpenRun
from evenstep.config.schema import Config, OneTaskTable
from evenstep.config.tasks import data_tables, evaluations_of
from evenstep.data import Data, GlobalBatch, Mixture, Position
from evenstep.data.seeding import undisturbed
from evenstep.errors import TaskError
from evenstep.events import Hook, Writer
from evenstep.options import Checkpointing, Logging, WriterName
from evenstep.parallel import Mesh, device_of_rank
from evenstep.pipeline import Layers
from evenstep.train import LoadedWeights, Task, Trainer, described_groups
from evenstep.train.state.loading import put_weights
from evenstep.train.tasks.modules import attach_modules
from evenstep.train.update.transfer import build_transfer

_Made = TypeVar("_Made")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of.

    Args:
        model: on the CPU, as initialised.
        task: what a batch means; several by name.
        data: the training set, or a mixture of those of several tasks.
        evaluations: the evaluation sets, by name.
        hooks: the recipe's own, in the order of the run file.
        writers: of the metrics: names, and those that the run file says by targets.
        groups: of the optimizer, in words, where the configuration makes some.
        loaded: what the model begins with that something else has trained, or None.
    """

    config: Config
    model: nn.Module
    task: Task | Mapping[str, Task]
    optimizer: torch.optim.Optimizer
    data: Data
    evaluations: Mapping[str, Data]
    hooks: Sequence[Hook]
    writers: Sequence[Writer | WriterName]
    groups: Sequence[str] = ()
    loaded: LoadedWeights | None = None

    def trainer(
        self,
        *,
        hooks: Sequence[Hook] = (),
        writers: Sequence[Writer | WriterName] = (),
        evaluations: Mapping[str, Data] | None = None,
        kept: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Trainer:
        """The trainer of these parts.

        Args:
            evaluations: what to evaluate on; nothing by default.
            kept: plain values that are kept with each checkpoint, such as the resolved configuration.
            more: further arguments of the trainer, such as `folder`.
        """
        config = self.config
        keeps = more.get("folder") is not None
        with refused_at("train"):
            trainer = Trainer(
                model=self.model,
                task=self.task,
                optimizer=self.optimizer,
                data=self.data,
                updates=config.train.updates,
                epochs=config.train.epochs,
                seed=config.seed,
                device=device_of_rank(config.device),
                precision=build_precision(config),
                lr_schedule=build_lr_schedule(config),
                evaluations=evaluations,
                hooks=hooks,
                train=build_training(config),
                checkpoint=build_checkpointing(config, kept) if keeps else Checkpointing(config=kept),
                failures=build_failures(config),
                log=Logging(**config.log.model_dump(exclude={"writers"}), writers=writers),
                **more,
            )
        if self.loaded is not None:
            self.loaded.freeze(self.model)  # now that the optimizer holds it: a hook may unfreeze it
        return trainer

    def first_inputs(self, device: torch.device) -> tuple[GlobalBatch, Any]:
        """The first global batch, and the model's inputs of its first micro-batch, on `device`."""
        with closing(cast("Any", self.data.batches(Position(), seed=self.config.seed))) as batches:
            batch: GlobalBatch = next(batches)
        first = batch.microbatches[0]
        task = self.task if isinstance(self.task, Task) else self.task[first.task]
        transfer = build_transfer(device)
        return batch, task.inputs(task.transform(first.data if transfer is None else transfer(first.data)))

    def close(self) -> None:
        """End the processes that load data."""
        for data in (self.data, *self.evaluations.values()):
            data.close()


def build_weights(config: Config, model: nn.Module) -> LoadedWeights | None:
    """Put the weights into the model that the run begins with, if it says any.

    Raises:
        ConfigError: a pattern that nothing fits.
        CheckpointError: weights that can't be read, or don't fit.
    """
    table = config.init_from
    if table is None:
        return None
    with refused_at("init_from.path"):
        return put_weights(model, **table.model_dump())


def build_parts(run: OpenRun, mesh: Mesh | None = None, *, begins: bool = True) -> RunParts:
    """Call everything that the run names, with as many threads of torch as the run is to have from here on.

    Args:
        begins: whether the model takes the weights that the run begins with; one that goes on has its own.

    Raises:
        ConfigError: data and their settings that don't fit each other, or an argument that a target refuses.
        TaskError: a target that gives something else than it must.
        Exception: whatever a target of the recipe raises.
    """
    config = run.config
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    model, loaded = _model_and_weights(run, mesh, begins=begins)
    hooks, task = prepared(run, model)
    optimizer = make_optimizer(run, model)
    data, evaluations = _build_sets(run)
    writers: list[Writer | WriterName] = [
        one if isinstance(one, str) else _make(run, f"log.writers.{index}", Writer)
        for index, one in enumerate(config.log.writers)
    ]
    return RunParts(
        config=config,
        model=model,
        task=task.get("", task),
        optimizer=optimizer,
        groups=described_groups(optimizer) if config.optimizer.is_divided else (),
        data=data,
        evaluations=evaluations,
        hooks=hooks,
        writers=writers,
        loaded=loaded,
    )


def prepared(run: OpenRun, model: nn.Module) -> tuple[list[Hook], dict[str, Task]]:
    """The hooks, which may have changed layers, and the tasks by name, whose parameters are part of the model now."""
    config = run.config
    hooks = [_make(run, f"hooks.{index}", Hook) for index in range(len(config.hooks))]
    for hook in hooks:
        hook.prepare(model)
    task = {name: _make_task(run, f"tasks.{name}", one) for name, one in config.tasks.items()}
    task = task or {"": _make_task(run, "task", cast("OneTaskTable", config.task))}
    attach_modules(model, task)
    return hooks, task


def _make(run: OpenRun, key: str, kind: type[_Made]) -> _Made:
    with seeded(run.config.seed), refused_at(key):
        made: object = run.calls[key]()
    return _checked(key, made, kind)


def _make_task(run: OpenRun, key: str, table: OneTaskTable) -> Task:
    task = _make(run, key, Task)
    if table.metrics:
        made = {name: _make(run, f"{key}.metrics.{name}", object) for name in table.metrics}
        task.metrics = {**task.metrics, **made}
    return task


def make_optimizer(run: OpenRun, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the model's parameters, in groups where the run has some."""
    config, calls = run.config, run.calls
    fuse = config.parallel.reduction == "fast" or device_of_rank(config.device).type != "cpu"
    shards = config.parallel.strategy == "fsdp"
    if config.optimizer.is_divided:
        return build_grouped(calls, model, config.optimizer, fuse=fuse, shards=shards)
    return build_optimizer(calls["optimizer"], model, config.optimizer.lr, fuse=fuse, shards=shards)


def _build_sets(run: OpenRun) -> tuple[Data, dict[str, Data]]:
    config, calls, tables = run.config, run.calls, data_tables(run.config)
    datasets = {key: _make(run, f"{key}.train", object) for key in tables}
    overfit, batches = config.overfit, config.limit.batches
    if overfit is not None:
        datasets = {key: first_samples(dataset, overfit, key) for key, dataset in datasets.items()}
    train = {
        key: build_data(
            table,
            config.failures,
            datasets[key],
            calls.get(f"{key}.collate"),
            key=key,
            pipeline_ranks=config.parallel.pipeline,
        )
        for key, table in tables.items()
    }
    evaluations = dict[str, Data]()
    for name in evaluations_of(config):
        some = {
            key: build_evaluation(
                name,
                table,
                config.failures,
                _make(run, f"{key}.evaluations.{name}", object) if overfit is None else datasets[key],
                calls.get(f"{key}.collate"),
                key=key,
            )
            for key, table in tables.items()
            if name in table.evaluations
        }
        evaluations[name] = Mixture(_by_task(some), end="max") if config.tasks else some["data"]
    data = build_mixture(config, _by_task(train)) if config.tasks else train["data"]
    if batches is None:
        return data, evaluations
    for one in (data, *evaluations.values()):
        one.limit_batches = min(batches, one.limit_batches or batches)
    return data, evaluations


def _model_and_weights(run: OpenRun, mesh: Mesh | None, *, begins: bool) -> tuple[nn.Module, LoadedWeights | None]:
    made, loaded = make_model(run), None
    if begins and isinstance(made, nn.Module):
        loaded = build_weights(run.config, made)
    model = build_model(run.config, made, mesh)
    if begins and not isinstance(made, nn.Module):  # its layers are only made in its stages
        loaded = build_weights(run.config, model)
    return model, loaded


def make_model(run: OpenRun) -> nn.Module | Layers:
    """What the model's target gives, its parameters drawn from the run's seed."""
    call = run.calls["model"]
    with seeded(run.config.seed), refused_at("model"):
        made: object = call()
    return made if isinstance(made, Layers) else _checked("model", made, nn.Module)


def _by_task(data: Mapping[str, Data]) -> dict[str, Data]:
    return {key.removeprefix("tasks.").removesuffix(".data"): one for key, one in data.items()}


def _checked(key: str, made: object, kind: type[_Made]) -> _Made:
    if not isinstance(made, kind):
        raise TaskError(f"`{key}.target` must give a `{kind.__name__}`, but gave a {type(made).__name__}.")
    return made


@contextmanager
def seeded(seed: int) -> Generator[None]:
    with undisturbed():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        yield
