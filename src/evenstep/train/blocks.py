"""Modules that options mean, and how they are changed: recomputed in the backward, compiled, multiplied in float8."""

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenstep.arguments import first_of
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import (
    buffers_of,
    children_of,
    compile_each_shape,
    compiled_in_place,
    pytree,
    times_written,
    unwrapped,
)
from evenstep.parallel import Fsdp, Group, Strategy
from evenstep.parallel.buffers import is_norm
from evenstep.parallel.fsdp import units
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.pipeline.compiled import compile_in_place
from evenstep.pipeline.deferred import DeferredLinear
from evenstep.precision import Float8Mixed, Precision
from evenstep.precision.float8 import is_converted, restore, why_not
from evenstep.tensors import plain
from evenstep.train.randomness import layers_of, may_draw

# --- Choice. Blocks are items of a list, or layers of a model in stages, of a class that stands there at least twice.


def choose_modules(model: nn.Module, meant: str, key: str = "memory.checkpoint") -> dict[str, nn.Module]:
    """The modules of this process that an option means, by name; all ranks of a pipeline call it together.

    Args:
        meant: "none", "blocks", or a pattern of names, in which `*` stands for any characters, dots as well; of modules
            that fit it within each other the outermost is meant. ArgumentError if no rank has any.
        key: of the option that means them.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> model = nn.Sequential(nn.Linear(3, 2), block(), block())
    >>> [*choose_modules(model, "blocks")], [*choose_modules(model, "1*")]
    (['1', '2'], ['1'])
    """
    if meant == "none":
        return {}
    in_stages = isinstance(model, PipelineModel)
    layers = model.own_layers() if in_stages else children_of(unwrapped(model))
    is_list = in_stages or _is_list(unwrapped(model))
    pipeline = pipeline_of(model)
    pairs = _repeated(layers, pipeline, is_list=is_list) if meant == "blocks" else _matching(layers, meant)
    found = _each_once(pairs)
    if not any(pipeline.gather(bool(found))):
        raise ArgumentError(
            f"`{key}` is {meant!r}, which no module fits: give a pattern of names of modules that are called, such as "
            f"those in {first_of([*layers])}.",
            field=key,
        )
    return found


def is_block(module: nn.Module) -> bool:
    """True for a module that is called, holds parameters, and is no single layer of torch."""
    is_layer = type(module).__module__.startswith(("torch.nn.", "evenstep.")) and not children_of(module)
    return not is_layer and _is_called(module) and any(True for _ in module.parameters())


def _each_once(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    firsts: dict[int, tuple[str, nn.Module]] = {}
    for name, module in modules:
        firsts.setdefault(id(module), (name, module))
    return dict(firsts.values())


def _repeated(
    items: Mapping[str, nn.Module], pipeline: Group | None = None, *, is_list: bool = False, above: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks among some modules, and within those that are none.

    The ranks of `pipeline` hold items of the same list, and ask together; `is_list` says that items stand in one list.
    """
    blocks = {name for name, one in items.items() if is_list and is_block(one) and not _lists_blocks(one)}
    mine = [_kind(items[name]) for name in blocks]
    everybody = [mine] if pipeline is None else pipeline.gather(mine)
    counts = Counter(kind for theirs in everybody for kind in theirs)
    for name, module in items.items():
        if name in blocks and counts[_kind(module)] > 1:
            yield plain(f"{above}{name}"), module
        else:
            yield from _repeated(children_of(module), None, is_list=_is_list(module), above=f"{above}{name}.")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _lists_blocks(module: nn.Module) -> bool:
    return _is_list(module) and any(map(is_block, children_of(module).values()))


def _kind(module: nn.Module) -> str:
    kind = type(unwrapped(module))
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _matching(layers: Mapping[str, nn.Module], pattern: str) -> list[tuple[str, nn.Module]]:
    every = {
        plain(f"{name}.{inner}".rstrip(".")): part
        for name, module in layers.items()
        for inner, part in module.named_modules(remove_duplicate=False)
    }
    called = {name: one for name, one in every.items() if fnmatchcase(name, pattern) and _is_called(one)}
    return [(name, one) for name, one in called.items() if not any(name.startswith(f"{other}.") for other in called)]


# --- Linear layers that multiply in float8.


def choose_linear_layers(model: nn.Module, precision: Precision) -> dict[str, nn.Linear]:
    """The linear layers that `precision` changes, within the modules that its `layers` means; ArgumentError for none.

    Left out are those whose sizes the format can't have, and classes of one's own that come from `nn.Linear`.
    """
    if not isinstance(precision, Float8Mixed):
        return {}
    found = {
        plain(f"{above}.{name}".rstrip(".")): part
        for above, module in choose_modules(model, precision.layers, "float8.layers").items()
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    }
    foreign = {
        name: type(part) not in (nn.Linear, DeferredLinear) and not is_converted(part) for name, part in found.items()
    }
    unfit = {name: f"is a {type(part).__name__}" if foreign[name] else why_not(part) for name, part in found.items()}
    chosen = {name: part for name, part in found.items() if not unfit[name]}
    if not any(pipeline_of(model).gather(bool(chosen))):
        reasons = first_of([f"`{name}` {why}" for name, why in unfit.items()], 3, "; ")
        raise ArgumentError(
            f"`float8.layers` is {precision.layers!r}, but no linear layer there can compute in float8: "
            f"{reasons or 'there is none'}. Mean layers of class `nn.Linear` whose features are multiples of 16, by a "
            f"pattern of module names, or use 'bf16-mixed'."
        )
    return chosen


def convert_linear_layers(model: nn.Module, precision: Precision, chosen: Mapping[str, nn.Linear]) -> None:
    """Change the chosen layers in place, and back what an engine before has changed of this model."""
    for module in model.modules():
        restore(module)
    if isinstance(precision, Float8Mixed):
        precision.convert_layers(chosen.values())


# --- Parts that are compiled. A hundred blocks take as long as one, and have the same bits whole and in stages.


def check_compiled(model: nn.Module, strategy: Strategy) -> None:
    """Raise ArgumentError for a model that would be compiled with other random numbers, or across shards."""
    parts = compiled_parts(model)
    if not isinstance(strategy, Fsdp):
        return
    modules = [*model.stage_modules.values()] if isinstance(model, PipelineModel) else [model]
    gathered = {id(unit) for module in modules for unit in units(module)}
    for name, part in parts.items():
        inner = next((key for key, one in part.named_modules() if key and id(one) in gathered), None)
        if inner is not None:
            raise ArgumentError(
                f"`compile` is 'model', but `{name or 'the model'}` is compiled whole, while shards of `{inner}` "
                f"in it are gathered; put blocks of one class into an `nn.ModuleList`, or share by 'ddp' or 'zero1'.",
                field="compile",
            )


def compiled_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are compiled by themselves, by name: layers or repeated blocks, or else the model.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> [*compiled_parts(nn.ModuleDict({"wte": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])}))]
    ['blocks.0', 'blocks.1']
    >>> [*compiled_parts(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))]
    ['']

    """
    if isinstance(model, PipelineModel):
        return {name: layer for name, layer in model.own_layers().items() if is_block(layer)}
    own = {id(part): name for name, part in model.named_modules()}
    known = [layer.build for layer in layers_of(model)]
    layers = {own[id(one)]: one for one in known if isinstance(one, nn.Module) and id(one) in own}
    blocks = {name: layer for name, layer in layers.items() if is_block(layer)}
    if blocks:
        return blocks
    draws = [name for name, layer in layers.items() if may_draw(layer)]
    if draws:
        raise ArgumentError(
            f"`compile` is 'model', but layer '{draws[0]}' is a single operation with random numbers; make "
            f"blocks of several layers (a class with a `forward`), or set `compile` to 'off'.",
            field="compile",
        )
    return _each_once(_repeated(children_of(model))) or {"": model}


def compile_model(model: nn.Module) -> None:
    """Compile the parts of a model in place, each when it is first called."""
    compile_each_shape()
    for part in compiled_parts(model).values():
        compile_in_place(part)


# --- Activations that are recomputed.

_CALLED = ("forward", "_compiled_call_impl")  # a compiled module is called past its `forward`


def recompute(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Recompute the forwards of some modules in the backward, and of no others.

    Args:
        model: modules that an earlier run has chosen in it are reset.
        chosen: the modules, by their names in the model; none within another.

    >>> _ = torch.manual_seed(0); block = nn.Sequential(nn.Linear(2, 2), nn.Tanh()); x = torch.ones(1, 2)
    >>> block(x).sum().backward(); kept = block[0].weight.grad.clone(); block.zero_grad()
    >>> recompute(block, {"0": block[0]}); block(x).sum().backward()
    >>> torch.equal(block[0].weight.grad, kept), list(block.state_dict())
    (True, ['0.weight', '0.bias'])
    """
    for module in model.modules():
        for attribute in _CALLED:
            earlier = vars(module).get(attribute)
            if isinstance(earlier, CheckpointedForward):
                earlier.remove(module)
    for name, module in chosen.items():
        attribute = _CALLED[compiled_in_place(module)]
        vars(module)[attribute] = CheckpointedForward(name, module, attribute)


@final
class CheckpointedForward:
    """Replacement of a module's `forward`, or of its compiled call, whose second run has the bits of the first.

    torch's non-reentrant checkpoint leaves names, state dicts and hooks as they are. The second forward has the random
    state, autocast and running statistics of the first. State in attributes changes twice.

    Args:
        attribute: of the module, which holds this.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str) -> None:
        self._name = name
        self._attribute = attribute
        self._own = vars(module).get(attribute)
        self._forward: Callable[..., Any] = getattr(module, attribute)
        self.__wrapped__ = self._forward  # so that its signature is seen
        self._buffers = [(buffers_of(part), name, part) for part in module.modules() for name in buffers_of(part)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # torch looks for devices among positional arguments alone; and it makes two tensors of one given twice
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = {id(one): one for one in leaves if isinstance(one, Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        where = [places.get(id(one), -1) for one in leaves]
        rest = [one if place < 0 else None for one, place in zip(leaves, where, strict=True)]
        values = self._values()
        generators = random.getstate(), np.random.get_state()

        def forward(*tensors: Tensor) -> Any:
            filled = [one if place < 0 else tensors[place] for one, place in zip(rest, where, strict=True)]
            args, kwargs = pytree.tree_unflatten(filled, form)
            return self._forward(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            return self._unwritten(values), self._as_before(values, generators)

        return checkpoint(forward, *tensors.values(), use_reentrant=False, context_fn=contexts)

    def remove(self, module: nn.Module) -> None:
        """Let the module call its own `forward` again."""
        if self._own is None:
            del vars(module)[self._attribute]
        else:
            vars(module)[self._attribute] = self._own

    def _values(self) -> list[Tensor | None]:
        return [registry.get(name) for registry, name, _ in self._buffers]

    @contextmanager
    def _unwritten(self, values: list[Tensor | None]) -> Generator[None]:
        versions = [0 if one is None else times_written(one) for one in values]
        yield
        for (_, name, part), value, version in zip(self._buffers, values, versions, strict=True):
            if value is not None and times_written(value) != version and not is_norm(part):
                raise TaskError(
                    f"the forward of `{self._name}` writes into its buffer `{name}`, so `memory.checkpoint` can't "
                    f"recompute it with the same bits: leave the module out.",
                    field=self._name,
                )

    @contextmanager
    def _as_before(self, values: list[Tensor | None], generators: tuple[Any, Any]) -> Generator[None]:
        """Inside, buffers and generators are as in the first forward; torch restores its own generators."""
        now = self._values()
        outer = random.getstate(), np.random.get_state()
        for place, (_, _, part) in enumerate(self._buffers):
            one = values[place]
            if one is not None and part.training and is_norm(part):  # written to once more
                values[place] = one.detach().clone()
        self._put(values, generators)
        try:
            yield
        finally:
            self._put(now, outer)

    def _put(self, values: list[Tensor | None], generators: tuple[Any, Any]) -> None:
        for (registry, name, _), value in zip(self._buffers, values, strict=True):
            registry[name] = value
        python, numpys = generators
        random.setstate(python)
        np.random.set_state(numpys)
