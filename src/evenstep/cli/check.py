"""`evenstep check RUN.toml`: finds the faults of a run file, builds the run and tries one update; writes nothing.

It starts the ranks of the run, loads the checkpoint that the run continues from, makes one update, evaluates one batch
of each set, and packs the state of hooks and data as a checkpoint would. Methods of the recipe's hooks are not called.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import final

from torch import Tensor, nn

from evenstep.arguments import first_of
from evenstep.checkpoint import complete_checkpoints, pack
from evenstep.cli.folder import folder_of, where_to_begin
from evenstep.cli.launch import on_ranks
from evenstep.config.build import RunParts, build_parts
from evenstep.config.load import OpenRun, from_arguments, open_run
from evenstep.data import Data, MapData, Mixture
from evenstep.events import Bus, EvaluateEvent, Hook, UpdateEvent
from evenstep.events.hooks.target import MetricTarget
from evenstep.internals import local_tensor
from evenstep.optim.groups import described_groups
from evenstep.optim.low_bit import inner_tensors
from evenstep.parallel import Group, mapped
from evenstep.parallel.rank_info import is_launched
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.process import EXIT_DONE
from evenstep.tensors import gradient_format, named_parameters
from evenstep.train import Engine, Trainer
from evenstep.train.build_loop import writers_of


def check(path: Path, settings: list[str]) -> int:
    """Check a run file; gives the exit code."""
    with open_run(path, from_arguments(settings)) as run:
        folder = folder_of(run.config)
        if not is_launched():
            where_to_begin(run.config.resume, folder, None)
        return on_ranks(run, ["check", str(path), *settings], lambda group: _check(run, folder, group), restarts=False)


@final
class OneUpdate(Hook):
    """Stops training after one update, and keeps its size and the events of evaluations."""

    def __init__(self) -> None:
        self.num_microbatches = 0
        self.num_samples = 0
        self.evaluated: dict[str, EvaluateEvent] = {}

    def before_update(self, event: UpdateEvent) -> None:
        self.num_microbatches = event.num_microbatches

    def after_update(self, event: UpdateEvent) -> None:
        if event.committed:  # not with a loss scale that was too high
            self.num_samples = event.num_samples
            self.trainer.request_stop("checked")

    def after_evaluate(self, event: EvaluateEvent) -> None:
        self.evaluated[event.name] = event


def _check(run: OpenRun, folder: Path, group: Group) -> int:
    config = run.config
    saved = complete_checkpoints(folder / "checkpoints") if config.resume == "auto" else []
    with closing(build_parts(config, group, begins=not saved)) as parts:
        for data in parts.evaluations.values():
            data.limit_batches = 1
        one = OneUpdate()
        one.averages_ranks = any(hook.averages_ranks for hook in parts.hooks)
        trainer = parts.for_trial().trainer(hooks=[one], kept=run.tables)
        lines = described(parts, trainer)
        if trainer.rank == 0:
            print("\n".join(lines), flush=True)
        writers_of(parts.writers, folder=None, every_updates=1)  # an extra may be missing
        best = deepcopy(config.checkpoint.best)
        hooks = Bus([*([] if best is None else [best]), *parts.hooks], trainer)
        if saved:
            trainer.resume(saved[-1])
        elif config.resume not in ("never", "auto"):
            trainer.resume(config.resume, new_settings=True, reset=config.reset)
        result = trainer.train()
        pack(hooks.state_dict(), "hooks")
        pack(parts.data.state_dict(), "data")
        parameters, _ = parameters_of(parts.model)
        if trainer.rank == 0:
            if one.num_samples:
                _check_followed(hooks.hooks, one.evaluated.values())
                parts_of_memory = footprint(trainer.engine).items()
                each = ", ".join(f"{name} {value / parameters:.3g}" for name, value in parts_of_memory if value)
                whole = sum(value for _, value in parts_of_memory) / parameters
                print(f"memory      {whole:.3g} bytes per parameter: {each}")
            _print_result(one, result.metrics)
    return EXIT_DONE


def _check_followed(hooks: Iterable[Hook], evaluated: Iterable[EvaluateEvent]) -> None:
    """Raise HookError if a metric that a hook follows does not exist."""
    for hook in hooks:
        for target in [one for one in vars(hook).values() if isinstance(one, MetricTarget)]:
            target.check(hook)
            for event in evaluated:
                target.value(hook, event)


def _print_result(one: OneUpdate, metrics: Mapping[str, float]) -> None:
    for name, event in one.evaluated.items():
        shown = ", ".join(f"{metric.removeprefix(f'{name}/')} {value:.4g}" for metric, value in event.metrics.items())
        print(f"evaluated   {name}, its first batch: {shown}")
    if not one.num_samples:
        print("checked     no update, since the run is done; nothing was written")
        return
    losses = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()) if name.endswith("loss"))
    what = f"1 update of {one.num_samples} samples in {one.num_microbatches} micro-batches"
    print(f"checked     {what}: {losses}; nothing was written")


def described(parts: RunParts, trainer: Trainer) -> list[str]:
    """Lines about the model, the data and the length of a run; all ranks call it together."""
    config = parts.config
    parameters, trained = parameters_of(parts.model)
    some = "" if trained == parameters else f" ({trained:,} of them trained)"
    engine = trainer.engine.parts
    device = engine.context.device
    lines = [f"model       {type(parts.model).__name__}, {parameters:,} parameters{some}, on {device}"]
    if parts.loaded is not None:
        lines += parts.loaded.described()
    if isinstance(parts.model, PipelineModel):
        stages = " | ".join(f"{stage}: {layers}" for stage, layers in parts.model.described().items())
        layout = parts.model.layout
        lines.append(f"stages      {layout.stages} on {layout.ranks} ranks; here {stages}")
    gather = pipeline_of(parts.model).gather
    for title, here in (
        ("memory      computed again in the backward:", engine.recomputed),
        ("float8     ", engine.linear_layers),
    ):
        names = dict.fromkeys(name for theirs in gather([*here]) for name in theirs)
        lines += [f"{title} {len(names)} modules, {first_of([*names], 4)}"] if names else []
    if config.optimizer.is_divided:
        lines += [f"group       {group}" for group in described_groups(parts.optimizer)]
    sets = {"train": parts.data, **parts.evaluations}
    lines.append(f"data        {', '.join(_samples(name, data) for name, data in sets.items())}")
    updates, per_epoch = trainer.updates, parts.data.num_batches(0, seed=config.seed)
    length = "until the data end" if updates is None else f"{updates:,} updates"
    if updates is not None and per_epoch:
        length += f" ({updates / per_epoch:.3g} epochs of {per_epoch:,} updates)"
    lines.append(f"run         {length}, precision {engine.precision.name}, seed {config.seed}")
    return lines


def parameters_of(model: nn.Module) -> tuple[int, int]:
    """Numbers of all and of trained parameters; of a model in stages over all ranks."""
    if isinstance(model, PipelineModel):
        return model.count_parameters()
    parameters = list(model.parameters())
    return sum(one.numel() for one in parameters), sum(one.numel() for one in parameters if one.requires_grad)


def _samples(name: str, data: Data) -> str:
    if isinstance(data, Mixture):
        return ", ".join(_samples(f"{name}/{task}", one) for task, one in data.data.items())
    if not isinstance(data, MapData):
        return f"{name} a stream"
    return f"{name} {data.num_samples:,} samples"


def footprint(engine: Engine) -> dict[str, int]:
    """Bytes on this rank by use, without activations and partial sums; gradients are those at their sum."""
    parts = engine.parts
    parameters, formats = named_parameters(engine.model), parts.averaged_as
    trained = [local_tensor(one) for one in parameters.values() if one.requires_grad]
    moments: list[Tensor] = []
    for of_parameter in parts.optimizer.state.values():  # counts of steps are 0-dim
        mapped(dict(of_parameter), lambda one: moments.extend(inner_tensors(one)) if one.ndim else None)

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(local.numel() * local.itemsize for local in map(local_tensor, tensors))

    return {
        "model": size(one for name, one in parameters.items() if name not in formats),
        "masters": size([*parts.stepper.masters.values(), *(parameters[name] for name in formats)]),
        "gradients": sum(one.numel() * gradient_format(one).itemsize for one in trained),
        "optimizer": size(moments),
        "average": 0 if parts.average is None else size(parts.average.state_dict()[name] for name in parameters),
    }
