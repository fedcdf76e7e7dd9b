"""Checks what a trainer is given, before anything is changed or run.

Each check raises with what was, what must be and what to do. Whether the parts fit each other shows in the first
update; whether they can at all shows here.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.devices import device_here
from evenstep.errors import ArgumentError, DataError, ReplicaError, TaskError
from evenstep.events import Incident
from evenstep.parallel import Group, Single, Strategy, device_of_rank, rank_info_of
from evenstep.parallel.rank_info import elastic_rank_of
from evenstep.pipeline import PipelineModel
from evenstep.precision import Precision
from evenstep.strides import shares_memory


def choose_device(device: str | torch.device, precision: Precision) -> torch.device:
    """The device by name; "auto" is the accelerator if there is one, else the CPU.

    Raises:
        ArgumentError: there is no such device, or it can't compute in this precision.

    >>> from evenstep.precision import FullPrecision
    >>> choose_device("cpu", FullPrecision())
    device(type='cpu')
    """
    chosen = device_here(device_of_rank("auto") if device == "auto" else device)
    precision.check(chosen)
    return chosen


def check_keeping(data: Data, *, keeps: bool, rewinds: bool) -> None:
    """Raise ArgumentError for a policy that has nothing to go back to, or checkpoints that can't be gone on from."""
    if rewinds and not keeps:
        raise ArgumentError(
            "a policy that goes back to a checkpoint needs checkpoints, but this run keeps none; give it a `folder` "
            "and let it keep some, or choose a policy that stops or skips."
        )
    if keeps and not data.resumable:
        raise ArgumentError(
            "a run with a `folder` saves checkpoints, but this stream cannot say where it is, so none could be "
            "resumed; give the stream `state_dict` and `load_state_dict`, give what has samples by number (a list, a "
            "dataset with a length) to `MapData`, or save none with `checkpoint=Checkpointing(keep_last=0)`."
        )


def try_resume(data: Data, group: Group) -> list[Incident]:
    """What is to be said about a resume on these data, found by trying it on their first items; all ranks ask together.

    Raises:
        DataError: on all ranks, when a resume on one of them would not be exact.
    """
    said, fault = "", ""
    raised: DataError | None = None
    try:
        said = data.try_resume()
    except DataError as error:
        fault, raised = str(error), error
    everybody = group.gather((said, fault)) if data.resumable and not data.knows_length else []
    if raised is not None:
        raise raised
    for rank, (_, theirs) in enumerate(everybody):
        if theirs:
            raise DataError(f"on rank {rank}: {theirs}")
    return [Incident(kind="resume", update=0, message=said, rank=group.rank)] if said else []


def check_same_on_all_ranks(group: Group, described: dict[str, object]) -> None:
    """Raise ReplicaError unless all ranks describe the same run; the message names rank and what differs."""
    everybody = group.gather(described)
    for rank, theirs in enumerate(everybody):
        for name, value in everybody[0].items():
            if theirs.get(name) != value:
                raise ReplicaError(
                    f"all ranks must train the same run, but `{name}` is {_short(theirs.get(name))} on rank {rank} and "
                    f"{_short(value)} on rank 0; give all ranks the same files, versions and settings."
                )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def check_model(model: nn.Module) -> None:
    """Raise TaskError unless the model has something to train, all of it on one device, and is nobody else's.

    Of a model in stages all pipeline ranks call it together: some of them may have nothing to train.
    """
    check_unwrapped(model)
    check_material(model)
    parameters = list(model.parameters())
    if not _anywhere(model, any(parameter.requires_grad for parameter in parameters)):
        what = f"all of its {len(parameters)} parameters are frozen" if parameters else "it has no parameters"
        raise TaskError(
            f"the model ({type(model).__name__}) has nothing to train: {what}; set `requires_grad` on those to train."
        )
    devices = {str(parameter.device) for parameter in parameters}
    if len(devices) > 1:
        raise TaskError(
            f"all parameters of the model must be on one device, but they are on {', '.join(sorted(devices))}; move "
            f"the model to one of them."
        )


def check_material(model: nn.Module) -> None:
    """Raise TaskError for parameters that no gradient could be taken of, and for what could not be put back."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise TaskError(
                f"`{name}` has no shape yet: its layer is lazy and finds it in its first forward. Call the model once "
                f"on a batch (`with torch.no_grad(): model(batch)`), and then build the optimizer and the trainer."
            )
        if parameter.is_meta:
            raise TaskError(
                f"`{name}` is on the meta device, where it has no numbers; build the model on the CPU, or give it "
                f"memory by `model.to_empty(device='cpu')` and set its numbers before the optimizer is built."
            )
        if parameter.is_inference():
            raise TaskError(
                f"`{name}` was made inside `torch.inference_mode()`, so no gradient can be taken of it; build the "
                f"model outside of that."
            )
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TaskError(
                f"`{name}` of the model's `state_dict()` must be a tensor, but is a {type(value).__name__}, as "
                f"`get_extra_state` may give: ranks could not agree on it, nor an aborted update take it back. Keep "
                f"what it holds in buffers (`register_buffer`), or give a tensor."
            )
        if shares_memory(value):
            raise TaskError(
                f"`{name}` of the model has elements that are the same memory (shape {tuple(value.shape)}, strides "
                f"{value.stride()}, as `expand` gives), so nothing can be written into it, by no step and by no "
                f"checkpoint; make it from `tensor.expand(…).clone()`."
            )


def check_unwrapped(model: nn.Module) -> None:
    """Raise ArgumentError for a model that something else shares between ranks already: sums would be made twice."""
    for name, part in model.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith("torch.")}
        wrapper = next((kind for kind in _WRAPPERS if kind in kinds), None)
        if wrapper is not None:
            where = f"its part `{name}`" if name else "the model"
            raise ArgumentError(
                f"the model must be given as it is, but {where} is wrapped in torch's {wrapper}, which shares "
                f"gradients between ranks by itself: {_WRAPPERS[wrapper]}, and say how ranks share it by `strategy`."
            )


_WRAPPERS = {
    "DistributedDataParallel": "give its `.module`, as it was before wrapping",
    "DataParallel": "give its `.module`, as it was before wrapping",
    "FullyShardedDataParallel": "build the model without it",
    "FSDPModule": "build the model without `fully_shard`",
}


def _anywhere(model: nn.Module, value: bool) -> bool:
    """Whether it is so on any of the ranks that share the stages of the model."""
    return any(model.mesh.pipeline.gather(value)) if isinstance(model, PipelineModel) else value


def check_trains(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise TaskError for an optimizer of frozen parameters only; all pipeline ranks call it together."""
    trains = any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])
    if not _anywhere(model, trains):
        raise TaskError("the optimizer has nothing to train: none of its parameters has `requires_grad`.")


def check_launched(strategy: Strategy | str | None, model: nn.Module, environ: Mapping[str, str]) -> None:
    """Raise ArgumentError where this process was started as one of several, but has not been told to train with them.

    Args:
        strategy: as it was given; None if it was not.
        model: whose stages may be shared.
    """
    _check_elastic(strategy, environ)
    alone = isinstance(strategy, Strategy) and strategy.ranks == 1 and not isinstance(strategy, Single)
    if alone and dist.is_initialized():
        return  # a process that has joined the others, and trains by itself now, does so on purpose
    if not (strategy is None or alone) or (isinstance(model, PipelineModel) and model.mesh.world.ranks > 1):
        return
    if "RANK" in environ and "WORLD_SIZE" not in environ:
        return  # not a launcher's
    place = rank_info_of(environ)
    if place is None or place.ranks == 1:
        return
    if alone:
        name = type(strategy).__name__
        raise ArgumentError(
            f"this process was started as {place}, but `strategy`, {name}, was given a group of one, so each would "
            f"train alone: give `{name}(Processes(device))` to train together, or `strategy=Single()` of "
            f"`evenstep.parallel` if each is a run of its own, in a folder of its own."
        )
    raise ArgumentError(
        f"this process was started as {place}, but `strategy` was not given, so each would train alone: give "
        f'`strategy="ddp"` (or "fsdp", "zero1") to train together, or `strategy=Single()` of '
        f"`evenstep.parallel` if each is a run of its own, in a folder of its own."
    )


def _check_elastic(strategy: Strategy | str | None, environ: Mapping[str, str]) -> None:
    """Raise ArgumentError for a strategy whose group knows nothing of the others that may come and go."""
    if isinstance(strategy, Single) or (isinstance(strategy, Strategy) and strategy.group.can_change):
        return
    place = elastic_rank_of(environ)
    if place is not None and place.count > 1:
        said = f'"{strategy}"' if isinstance(strategy, str) else type(strategy).__name__
        given = "was not given" if strategy is None else f"knows only ranks that stay ({said})"
        raise ArgumentError(
            f"this process was started as {place.number} of {place.count} that may come and go (REPLICA_GROUP_ID), but "
            f"`strategy` {given}, so each would train without the others: give `strategy=Ordered(Elastic(Lighthouse("
            f"elastic_rank_of(os.environ)), timeout_s=60))`, with names of `evenstep.extras.elastic`, or "
            f"`strategy=Single()` of `evenstep.parallel` if each is a run of its own, in a folder of its own."
        )
