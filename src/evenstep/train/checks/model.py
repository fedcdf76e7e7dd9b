"""Checks the model that a trainer is given, before anything is changed: it is whole, and each parameter can be trained.

A parameter is stepped once, and gradients can be taken of it; nothing else shares the model between ranks. What becomes
of the parameters while the run goes on is `trained`'s to watch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import unwrapped
from evenstep.names import named_parameters, parameters_in, state_of
from evenstep.options import Training
from evenstep.parallel import Strategy
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.pipeline.ties import check_frozen
from evenstep.precision import Precision, SixteenBits
from evenstep.strides import is_dense, overlapping, shares_memory
from evenstep.train.state.train_state import parameter_names
from evenstep.train.trained import check_gradient_hooks


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
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise TaskError(
                f"the buffer `{name}` is on the meta device, where it has no numbers; build the model on the CPU, or "
                f"give it memory by `model.to_empty(device='cpu')` and set its numbers."
            )
        if buffer.is_inference():
            raise TaskError(
                f"the buffer `{name}` was made inside `torch.inference_mode()`, so nothing tells whether a forward has "
                f"written to it; build the model outside of that."
            )
        if buffer.is_nested and buffer.layout == torch.strided:
            raise TaskError(
                f"the buffer `{name}` is a nested tensor in torch's old layout, of which nobody can tell whether a "
                f"forward has changed it; make it with `layout=torch.jagged`, or pad it to one plain tensor."
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


def check_buffers(model: nn.Module, *, ranks: int, keeps: bool) -> None:
    """Raise TaskError for buffers without plain values where ranks share them or checkpoints hold them."""
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if is_dense(buffer):
            continue
        kind = "quantised" if buffer.is_quantized else "nested" if buffer.is_nested else "sparse"
        plain = "keep its parts in plain tensors (such as indices and values) and put it together in the forward"
        if ranks > 1:
            raise TaskError(
                f"the buffer `{name}` is {kind}, and {ranks} ranks can't be sure to hold the same of it, since only "
                f"plain tensors are sent between them; {plain}, or keep it out of the buffers, in a plain attribute."
            )
        if keeps and name in saved:
            raise TaskError(
                f"the buffer `{name}` is {kind}, for which checkpoints have no format; {plain}, or let no checkpoint "
                f"hold it (`register_buffer(…, persistent=False)`)."
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
    return any(pipeline_of(model).gather(value))


def check_trains(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise TaskError for an optimizer of frozen parameters only; all pipeline ranks call it together."""
    trains = any(parameter.requires_grad for parameter in parameters_in(optimizer))
    if not _anywhere(model, trains):
        raise TaskError("the optimizer has nothing to train: none of its parameters has `requires_grad`.")


def check_parameters(model: nn.Module, optimizer: Optimizer, precision: Precision) -> None:
    """Raise ArgumentError for parameters that can't be trained as they are; the message names the first.

    Args:
        model: not yet moved or wrapped.
        precision: of the run, which says what formats it trains.
    """
    by_name = dict(unwrapped(model).named_parameters())
    _check_whole(by_name | dict(unwrapped(model).named_buffers()))
    names = parameter_names(model, optimizer)
    _check_once(names, model)
    _check_saved(names, model)
    _check_dense(names, optimizer, by_name)
    check_gradient_hooks(by_name)
    held = {name for group in names for name in group}
    precision.check_trained({name: one for name, one in by_name.items() if one.requires_grad and name in held})


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise ArgumentError(
                f"`{name}` of the model is a DTensor: it is cut over ranks, or copied on them, by something else "
                f"(tensor parallelism, `fully_shard`, another trainer), so norms, sums and checkpoints would be of a "
                f"part of it. Give the trainer the whole model as it is built on one process, and let its `strategy` "
                f"share it: `Fsdp` or `OrderedFsdp` for shards, `PipelineModel` for models that don't fit one device."
            )


def _check_saved(names: list[list[str]], model: nn.Module) -> None:
    """Raise ArgumentError for a stepped parameter that no checkpoint would hold, or under a name that nobody knows."""
    held = state_of(unwrapped(model)).keys()
    for name in (name for group in names for name in group if name not in held):
        raise ArgumentError(
            f"`{name}` is in the optimizer, but not in the model's `state_dict()` under this name, so no checkpoint "
            f"could give it back; give the model as it was before it was wrapped, let its `state_dict` hold all that "
            f"the optimizer does, or give the optimizer only what is in it."
        )


def _check_dense(names: list[list[str]], optimizer: Optimizer, by_name: Mapping[str, Tensor]) -> None:
    """Raise ArgumentError for a part of a larger tensor where a kernel would step all that lies in between as well."""
    for number, (own, group) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        for name in own if group.get("fused") else ():
            if (one := by_name.get(name)) is not None and torch.empty_like(one).stride() != one.stride():
                raise ArgumentError(
                    f"`{name}` is a part of a larger tensor (of strides {one.stride()} for shape {tuple(one.shape)}), "
                    f"and torch's fused optimizers step what lies between its elements in their place; make it from "
                    f"`tensor.clone()`, or leave `fused` out of group {number} of the optimizer."
                )


def _check_once(names: list[list[str]], model: nn.Module) -> None:
    """Raise ArgumentError for a parameter that would be stepped twice."""
    places: dict[str, int] = {}
    for number, group in enumerate(names):
        for name in group:
            if name in places:
                same = {id(one): key for key, one in unwrapped(model).named_parameters()}
                every = unwrapped(model).named_parameters(remove_duplicate=False)
                others = [key for key, one in every if same.get(id(one)) == name and key != name]
                tied = f", which is tied to `{others[0]}`," if others else ""
                raise ArgumentError(
                    f"`{name}`{tied} is in the optimizer twice, in group {places[name]} and in group {number}, so it "
                    f"would be stepped twice in each update; give each parameter once, as `model.parameters()` does."
                )
            places[name] = number


def check_layers(model: nn.Module, *, strategy: Strategy, precision: Precision, train: Training) -> None:
    """Raise ArgumentError for a layer that is not for a run of this kind, such as one that a hook changes meanwhile.

    It says so itself by `evenstep_not_for`: why it can't be in a run of a kind, by the kind. The core knows the kinds,
    not the layers.

    The kinds are "changing ranks", "16 bits" (of the parameters themselves) and "compile".
    """
    holds_float32 = precision.keeps_masters and strategy.layout.divides == "elements"  # and rounds what it gathers
    kinds = {
        "changing ranks": strategy.group.can_change,
        "16 bits": isinstance(precision, SixteenBits) and not holds_float32,
        "compile": train.compile != "off",
    }
    for name, module in model.named_modules():
        not_for: Mapping[str, str] = getattr(module, "evenstep_not_for", {})
        for kind in (kind for kind, is_so in kinds.items() if is_so and kind in not_for):
            raise ArgumentError(f"`{name}` is a {type(module).__name__}, {not_for[kind]}.")


def check_memory(model: nn.Module, strategy: Strategy) -> None:
    """Raise ArgumentError for tensors in common memory that ranks which divide parameters would make different ones."""
    divides = strategy.layout.divides
    if divides == "nothing":
        return
    whole = unwrapped(model)
    named = {name: one for name, one in whole.named_parameters() if one.requires_grad}
    buffers = dict(whole.named_buffers()) if divides == "elements" else {}
    plain = {name: one for name, one in (named | buffers).items() if type(one.detach()) is Tensor}
    found = overlapping(plain, beside=buffers)
    if found is not None:
        raise ArgumentError(
            f"`{found[0]}` and `{found[1]}` of the model are tensors over the same memory, which they would no longer "
            f"be where ranks divide parameters among them: a step of the one would leave the other as it is. Make one "
            f"of them from `tensor.clone()`, give one parameter both names, or use `ddp`, whose ranks hold all."
        )


def check_ties(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Raise ArgumentError where stages would step their copies of one parameter otherwise; all pipeline ranks ask.

    Copies that are not stepped alike become different parameters.

    Args:
        groups: the names of the parameters of this rank's optimizer, by group.
    """
    if not isinstance(model, PipelineModel):
        return
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    firsts, held = model.aliases, named_parameters(model)
    tied = {*firsts, *firsts.values()} & held.keys()
    mine = {name: (group_of.get(name), held[name].requires_grad) for name in sorted(tied)}
    places: dict[str, tuple[str, int | None]] = {}
    trains: dict[str, dict[str, bool]] = {}
    for name, (number, is_trained) in [each for theirs in model.mesh.pipeline.gather(mine) for each in theirs.items()]:
        first = firsts.get(name, name)
        trains.setdefault(first, {})[name] = is_trained
        other, before = places.setdefault(first, (name, number))
        if before != number:
            raise ArgumentError(
                f"`{other}` and `{name}` are one parameter, of which two stages have a copy, but the optimizers hold "
                f"them in {_group(before)} and in {_group(number)}, so the copies would become different; give them "
                f"the same group on all ranks, by their names rather than by their places."
            )
    for copies in trains.values():
        check_frozen(copies)


def _group(number: int | None) -> str:
    return "no group" if number is None else f"group {number}"
