"""Parts of a model that `compile = "model"` compiles.

Blocks are compiled one by one: a hundred take as long as one, and have the same bits whole and in stages.
"""

from torch import nn

from evenstep.errors import ArgumentError
from evenstep.internals import children_of, compile_each_shape
from evenstep.parallel import Fsdp, Strategy
from evenstep.parallel.fsdp import units
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.compiled import compile_in_place
from evenstep.train.blocks import is_block, repeated_blocks
from evenstep.train.layer_keys import layers_of, may_draw


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

    Raises:
        ArgumentError: there are no blocks, and the whole would draw other random numbers than its layers.
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
    return repeated_blocks(children_of(model)) or {"": model}


def compile_model(model: nn.Module) -> None:
    """Compile the parts of a model in place, each when it is first called."""
    compile_each_shape()
    for part in compiled_parts(model).values():
        compile_in_place(part)
