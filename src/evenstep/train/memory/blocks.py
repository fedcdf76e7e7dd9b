"""The repeated blocks of a model, and which modules an option means: those, or what fits a pattern.

Blocks are items of an `nn.ModuleList` or `nn.Sequential`, or layers of a model in stages, of a class that stands there
at least twice; they hold parameters and are more than one layer of torch's. What is inside a block is none, and a list
that holds some is none itself. All ranks of a pipeline ask together and get the same answer. It changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.internals import children_of, compiled_in_place, unwrapped
from evenstep.parallel import Group
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.tensors import plain


class Chosen(NamedTuple):
    """The modules that were meant.

    Args:
        here: those that this process holds, by name.
        names: of all, also of those that other ranks of its pipeline hold.
    """

    here: Mapping[str, nn.Module]
    names: tuple[str, ...]


def choose_modules(model: nn.Module, meant: str) -> Chosen:
    """The modules that `memory.checkpoint` means.

    Args:
        meant: as for `modules_meant`.

    Raises:
        ArgumentError: there is none, one is within what was compiled as a whole, or has scripted parts with buffers.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> model = nn.Sequential(nn.Linear(3, 2), block(), block())
    >>> choose_modules(model, "blocks").names, choose_modules(model, "1*").names
    (('1', '2'), ('1',))
    """
    here = modules_meant(model, meant, "memory.checkpoint")
    _check_compiled(model, _layers_of(model), here)
    return chosen(model, here)


def modules_meant(model: nn.Module, meant: str, key: str) -> dict[str, nn.Module]:
    """The modules of this process that are meant, by name. All ranks of a pipeline ask together.

    Args:
        meant: "none", "blocks", or a pattern of names, in which `*` stands for any characters, dots as well; of modules
            that fit it within each other the outermost is meant.
        key: of the option that means them, for people.

    Raises:
        ArgumentError: there is none, on any rank.
    """
    if meant == "none":
        return {}
    pipeline, layers = pipeline_of(model), _layers_of(model)
    found = _blocks(model, layers, pipeline, key) if meant == "blocks" else _matching(layers, meant, pipeline, key)
    return _each_once(found.items())


def chosen(model: nn.Module, here: Mapping[str, nn.Module]) -> Chosen:
    names = dict.fromkeys(name for theirs in pipeline_of(model).gather(tuple(here)) for name in theirs)
    return Chosen(here, tuple(names))


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(model, PipelineModel):
        return dict(children_of(unwrapped(model)))
    return model.own_layers()


def _blocks(model: nn.Module, layers: Mapping[str, nn.Module], pipeline: Group, key: str) -> dict[str, nn.Module]:
    in_stages = isinstance(model, PipelineModel)
    is_list = in_stages or _is_list(unwrapped(model))
    found = repeated_blocks(layers, pipeline if in_stages else None, is_list=is_list)
    if not any(pipeline.gather(bool(found))):
        raise ArgumentError(
            f'`{key}` is "blocks", but {type(unwrapped(model)).__name__} has none: no `nn.ModuleList` or '
            f"`nn.Sequential` of it{_OF_STAGES * in_stages} holds two modules of one class that "
            f"have parameters and are more than a single layer; give a pattern of module names, such as "
            f'"{_example(layers)}"{_or_none(key)}.',
            field=key,
        )
    return found


_OF_STAGES = ", nor the layers that its stages are made of,"


def repeated_blocks(
    items: Mapping[str, nn.Module], pipeline: Group | None = None, *, is_list: bool = False
) -> dict[str, nn.Module]:
    """The blocks among some modules, and within those that are none; the outermost ones, each once.

    Args:
        items: by name.
        pipeline: the ranks that hold items of the same list; they ask together.
        is_list: whether the items stand in one list.
    """
    return _each_once(_repeated(items, pipeline, is_list=is_list))


def _each_once(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    firsts: dict[int, str] = {}
    return {name: module for name, module in modules if firsts.setdefault(id(module), name) == name}


def is_block(module: nn.Module) -> bool:
    is_layer = type(module).__module__.startswith(("torch.nn.", "evenstep.")) and not children_of(module)
    return not is_layer and _is_called(module) and any(True for _ in module.parameters())


def _repeated(
    items: Mapping[str, nn.Module], pipeline: Group | None, *, is_list: bool, above: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    kinds = {name: _kind(one) for name, one in items.items() if is_list and is_block(one) and not _lists_blocks(one)}
    counts = Counter(kinds.values())
    if pipeline is not None:
        counts = Counter(kind for theirs in pipeline.gather(list(kinds.values())) for kind in theirs)
    for name, module in items.items():
        full = f"{above}{name}"
        if name in kinds and counts[kinds[name]] > 1:
            yield plain(full), module
        else:
            yield from _repeated(children_of(module), None, is_list=_is_list(module), above=f"{full}.")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _lists_blocks(module: nn.Module) -> bool:
    return _is_list(module) and any(map(is_block, children_of(module).values()))


def _kind(module: nn.Module) -> str:
    kind = type(unwrapped(module))
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_called(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False  # not by what could compute it again
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _matching(layers: Mapping[str, nn.Module], pattern: str, pipeline: Group, key: str) -> dict[str, nn.Module]:
    every = {
        plain(f"{name}.{inner}".rstrip(".")): part
        for name, module in layers.items()
        for inner, part in module.named_modules(remove_duplicate=False)
    }
    fitting = [name for name in every if fnmatchcase(name, pattern)]
    called = {name: every[name] for name in fitting if _is_called(every[name])}
    found = {name: module for name, module in called.items() if not any(_is_above(other, name) for other in called)}
    everybody = pipeline.gather((list(every), fitting, bool(found)))
    if not any(finds for _, _, finds in everybody):
        names = [name for theirs, _, _ in everybody for name in theirs]
        containers = [name for _, theirs, _ in everybody for name in theirs]
        if any(isinstance(every.get(name), torch.jit.ScriptModule) for name in containers):
            raise ArgumentError(
                f"`{key}` must fit modules that can be computed again, but '{pattern}' fits `{containers[0]}`, which "
                f"is compiled by `torch.jit`; give it as it was before that, or fit another."
            )
        if containers:
            raise ArgumentError(
                f"`{key}` must fit modules that are called, but '{pattern}' fits only `{containers[0]}`, "
                f"which holds others; write '{containers[0]}.*'.",
                field=key,
            )
        near = get_close_matches(pattern, names, cutoff=0.4) or names[:8]
        raise ArgumentError(
            f'`{key}` must be "blocks"{_or_none(key)} or a pattern that fits the name of a module, but '
            f"'{pattern}' fits none; there are {', '.join(f'`{name}`' for name in near)}.",
            field=key,
        )
    return found


def _or_none(key: str) -> str:
    return ', "none"' if key == "memory.checkpoint" else ""


def _is_above(other: str, name: str) -> bool:
    return name.startswith(f"{other}.")


def _example(layers: Mapping[str, nn.Module]) -> str:
    return next((plain(name) for name, one in layers.items() if any(True for _ in one.parameters())), "encoder.*")


def _check_compiled(model: nn.Module, layers: Mapping[str, nn.Module], chosen: Mapping[str, nn.Module]) -> None:
    """Raise ArgumentError for a module within a compiled one: what stands around its forward would be compiled.

    Likewise for one with a part that `torch.jit` has compiled and that has buffers: nothing else can be put in the
    place of those while it is computed again, so it would move them twice.
    """
    whole = unwrapped(model) is not model or compiled_in_place(model)
    within = {
        id(part): name
        for name, module in layers.items()
        for _, compiled in module.named_modules()
        if unwrapped(compiled) is not compiled or compiled_in_place(compiled)
        for part in compiled.modules()
        if part is not compiled
    }
    for name, module in chosen.items():
        if whole or id(module) in within:
            where = f"`{within[id(module)]}`" if not whole else "the model"
            raise ArgumentError(
                f"`memory.checkpoint` means `{name}`, but {where}, which it is a part of, was compiled as a whole, "
                f"where nothing can be computed again by itself; compile the blocks one by one "
                f'(`model.blocks[0].compile()`), or set it to "none".',
                field="memory.checkpoint",
            )
        scripted = [
            part_name
            for part_name, part in module.named_modules()
            if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.buffers())
        ]
        if scripted:
            raise ArgumentError(
                f"`memory.checkpoint` means `{name}`, but its part `{scripted[0]}` is compiled by `torch.jit` and has "
                f"buffers, which it would move again when it is computed again; give it as it was before that, or "
                f"mean other modules."
            )
