"""Modules that an option means: the repeated blocks of a model, or those whose names fit a pattern.

Blocks are items of a list, or layers of a model in stages, of a class that stands there at least twice; they hold
parameters and are more than one layer of torch's. Blocks are not looked for inside of blocks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from evenstep.arguments import first_of
from evenstep.errors import ArgumentError
from evenstep.internals import children_of, unwrapped
from evenstep.parallel import Group
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.tensors import plain


class Chosen(NamedTuple):
    """The modules that an option means.

    Args:
        here: those of this process, by name.
        names: of all, also of those on other ranks of its pipeline.
    """

    here: Mapping[str, nn.Module]
    names: tuple[str, ...]


def choose_modules(model: nn.Module, meant: str, key: str = "memory.checkpoint") -> Chosen:
    """The modules that an option means; all ranks of a pipeline call it together.

    Args:
        meant: "none", "blocks", or a pattern of names, in which `*` stands for any characters, dots as well; of modules
            that fit it within each other the outermost is meant.
        key: of the option that means them.

    Raises:
        ArgumentError: there is none, on any rank.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> model = nn.Sequential(nn.Linear(3, 2), block(), block())
    >>> choose_modules(model, "blocks").names, choose_modules(model, "1*").names
    (('1', '2'), ('1',))
    """
    if meant == "none":
        return Chosen({}, ())
    if isinstance(model, PipelineModel):
        layers = model.own_layers()
        is_list = True
    else:
        whole = unwrapped(model)
        layers = children_of(whole)
        is_list = _is_list(whole)
    if meant == "blocks":
        found = repeated_blocks(layers, pipeline_of(model), is_list=is_list)
    else:
        found = _matching(layers, meant)
    result = chosen(model, found)
    if not result.names:
        raise ArgumentError(
            f"`{key}` is {meant!r}, which no module fits: give a pattern of names of modules that are called, such as "
            f"those in {first_of([*layers])}.",
            field=key,
        )
    return result


def chosen(model: nn.Module, here: Mapping[str, nn.Module]) -> Chosen:
    """The choice of all ranks of a pipeline."""
    names = dict.fromkeys(name for theirs in pipeline_of(model).gather(tuple(here)) for name in theirs)
    return Chosen(here, tuple(names))


def repeated_blocks(
    items: Mapping[str, nn.Module], pipeline: Group | None = None, *, is_list: bool = False
) -> dict[str, nn.Module]:
    """The outermost blocks among some modules, and within those that are none, each once.

    Args:
        pipeline: the ranks that hold items of the same list; they ask together.
        is_list: True if the items stand in one list.
    """
    return _each_once(_repeated(items, pipeline, is_list=is_list))


def is_block(module: nn.Module) -> bool:
    """True for a module that is called, holds parameters, and is no single layer of torch."""
    is_layer = type(module).__module__.startswith(("torch.nn.", "evenstep.")) and not children_of(module)
    return not is_layer and _is_called(module) and any(True for _ in module.parameters())


def _each_once(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    firsts: dict[int, str] = {}
    return {name: module for name, module in modules if firsts.setdefault(id(module), name) == name}


def _repeated(
    items: Mapping[str, nn.Module], pipeline: Group | None, *, is_list: bool, above: str = ""
) -> Iterator[tuple[str, nn.Module]]:
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


def _matching(layers: Mapping[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    every = {
        plain(f"{name}.{inner}".rstrip(".")): part
        for name, module in layers.items()
        for inner, part in module.named_modules(remove_duplicate=False)
    }
    called = {name: one for name, one in every.items() if fnmatchcase(name, pattern) and _is_called(one)}
    outermost = (name for name in called if not any(name.startswith(f"{other}.") for other in called))
    return _each_once((name, called[name]) for name in outermost)
