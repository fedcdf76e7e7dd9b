"""Which parts of a model are compiled, decided once, and what is said of it during the run.

Where a model has blocks they are compiled one by one, so that compiling takes as long for a hundred of them as for one,
and a block computes the same bits whole and in stages; else it is compiled as a whole. Layers of one operation that
stand between blocks are left as they are. What can't be compiled is refused, or left as it is and named.
"""

import os
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.events import Incident
from evenstep.internals import children_of, compiled_in_place, has_inner_hooks, unwrapped
from evenstep.internals.compiler import compile_each_shape, cpp_compiler_fault
from evenstep.parallel import Strategy
from evenstep.parallel.reducer.sharded import Sharded, units
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.compiled import CompiledForward, Made, compile_in_place, described
from evenstep.train.layer_keys import layers_of, may_draw
from evenstep.train.memory.blocks import is_block, repeated_blocks

REPEATED = 8
"""So often a block may be compiled before it is said, and then at twice as often, and so on."""


def check_compiled(model: nn.Module, strategy: Strategy, device: torch.device) -> None:
    """Raise ArgumentError for a model, ranks or a machine with which `compile="model"` can't be; nothing is changed."""
    check_compiler(device, "model")
    called = {**dict(model.named_modules()), **(model.own_layers() if isinstance(model, PipelineModel) else {})}
    for name, part in called.items():
        if unwrapped(part) is not part or compiled_in_place(part):
            raise ArgumentError(
                f"`compile` is 'model', but {described(name, part)} is compiled already; give the model as it is "
                f"written, or set `compile` to 'off'."
            )
    found = parts_of(model)
    unfit = {name: why for name, part in found.items() if (why := _unfit(part))}
    if len(unfit) == len(found) > 0:
        name, why = next(iter(unfit.items()))
        raise ArgumentError(
            f"`compile` is 'model', but nothing of it can be compiled: {described(name, found[name])} {why}. Change "
            f"that, or set `compile` to 'off'."
        )
    if isinstance(strategy, Sharded):
        _check_shards(model, found)


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """What is compiled by itself, by name; "" is the model.

    Those are its layers, where they are known, as far as they are blocks; else its repeated blocks
    (`evenstep.train.memory.blocks`).

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> [*parts_of(nn.ModuleDict({"wte": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])}))]
    ['blocks.0', 'blocks.1']
    >>> [*parts_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))]
    ['']

    Raises:
        ArgumentError: there are no blocks, and the model can't be compiled as a whole. Pipeline ranks find it together.
    """
    if isinstance(model, PipelineModel):
        layers = model.own_layers()
    else:
        own = {id(part): name for name, part in model.named_modules()}
        said = [layer.build for layer in layers_of(model)]
        layers = {own[id(one)]: one for one in said if isinstance(one, nn.Module) and id(one) in own}
    blocks = {name: layer for name, layer in layers.items() if is_block(layer)}
    if isinstance(model, PipelineModel):
        if not any(model.mesh.pipeline.gather(bool(blocks))):
            raise ArgumentError(
                "`compile` is 'model', which compiles the layers of a model in stages one by one, but each of them is "
                "a single operation of torch, of which nothing would become faster; make layers of several (a class "
                "of your own, with a `forward`), or set `compile` to 'off'."
            )
        return blocks
    if blocks:
        return blocks
    draws = [name for name, layer in layers.items() if may_draw(layer)]
    if draws:
        raise ArgumentError(
            f"`compile` is 'model', but the model's layers are single operations of torch, and as a whole it would "
            f"draw other numbers in layer '{draws[0]}', which is seeded by itself; make blocks of several layers (a "
            f"class of your own, with a `forward`), or set `compile` to 'off'."
        )
    return repeated_blocks(children_of(model)) or {"": model}


def compile_model(model: nn.Module, report: Callable[[Incident], None], rank: int) -> "CompiledModel":
    """Compile the parts of a model in place, each when it is first called.

    Args:
        report: told of what was not compiled, or again and again.
    """
    compile_each_shape()
    made: list[Made] = []
    found = parts_of(model)
    unfit = {name: why for name, part in found.items() if (why := _unfit(part))}
    forwards = {name: compile_in_place(part, name, made) for name, part in found.items() if name not in unfit}
    left = [f"{described(name, found[name])} {why}" for name, why in unfit.items()]
    return CompiledModel(found, forwards, made, left, report, rank)


@final
class CompiledModel:
    """The compiled parts of a model, and what has become of them.

    Args:
        parts: all that were to be compiled, by name.
        forwards: of those that are.
        made: what was compiled since it was last looked at.
        left: what was not compiled, and why.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        forwards: Mapping[str, CompiledForward],
        made: list[Made],
        left: list[str],
        report: Callable[[Incident], None],
        rank: int,
    ) -> None:
        self._parts, self._forwards, self._made = parts, forwards, made
        self._left, self._report, self._rank = left, report, rank
        self._times: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._broken: set[str] = set()
        self._looked = False

    @property
    def compilations(self) -> int:
        """How often something was compiled up to the last update."""
        return self._times.total()

    def look(self, update: int) -> None:
        """After an update's passes: say what was not compiled as a whole, or has been compiled again and again."""
        if not self._looked:
            self._looked = True
            self._say_what_is_not(update)
        if self._made:
            made = self._made.copy()
            self._made.clear()
            for one in made:
                self._count(one, update)

    def _say_what_is_not(self, update: int) -> None:
        idle = [name for name, forward in self._forwards.items() if not forward.has_compiled]
        never = [
            f"{described(name, self._parts[name])} was not called, or has nothing that torch can compile"
            for name in idle
        ]
        for what in (*self._left, *never):
            self._say("not_compiled", update, f"{what}; it is trained as it is written.")

    def _count(self, one: Made, update: int) -> None:
        self._times[one.block] += 1
        times, part = self._times[one.block], described(one.block, self._parts[one.block])
        kind = type(self._parts[one.block]).__name__
        if one.parts > 1 and kind not in self._broken:
            self._broken.add(kind)
            why = (
                "; ".join(one.breaks).rstrip(".")
                or "it branches on what tensors hold, or calls what torch can't follow"
            )
            self._say(
                "not_compiled",
                update,
                f"{part} is compiled in {one.parts} parts instead of one, which costs time in each pass: {why}.",
            )
        if times >= REPEATED and times & (times - 1) == 0:
            self._say(
                "recompiled",
                update,
                f"{part} was compiled {times} times up to update {update}, each time for seconds, since what it is "
                f"called with changes: {one.called_with} after {self._last[one.block]}. Let batches have few shapes "
                f"(lengths padded to multiples, whole micro-batches), or set `compile` to 'off'.",
            )
        self._last[one.block] = one.called_with

    def _say(self, kind: str, update: int, message: str) -> None:
        self._report(Incident(kind=kind, update=update, message=message, rank=self._rank))


def _unfit(part: nn.Module) -> str:
    """Why a part can't be compiled, as the end of a sentence, or ""."""
    scripted = next((one for one in part.modules() if isinstance(one, torch.jit.ScriptModule)), None)
    if scripted is not None:
        return "holds a module that `torch.jit` has compiled"
    if any(getattr(one, "sparse", False) is True for one in part.modules()):
        return "makes sparse gradients"
    if has_inner_hooks(part):
        return "has modules with hooks, which are called at each micro-batch"
    return ""


def _check_shards(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Raise ArgumentError where something is gathered inside of what is compiled."""
    modules = [*model.stage_modules.values()] if isinstance(model, PipelineModel) else [model]
    gathered = {id(unit) for module in modules for unit in units(module)}
    for name, part in parts.items():
        inner = next((key for key, one in part.named_modules() if key and id(one) in gathered), None)
        if inner is not None:
            raise ArgumentError(
                f"`compile` is 'model', but {described(name, part)} would be compiled in one piece, while "
                f"`{inner}` in it is gathered from shards by itself; put several blocks of one class into the model's "
                f"`nn.ModuleList`, share by 'ddp' or 'zero1', or set `compile` to 'off'."
            )


def check_compiler(device: torch.device, compile: str) -> None:
    """Raise ArgumentError where a compiler is missing that `torch.compile` needs for this device."""
    lacking = next(_lacking(device), "")
    if lacking:
        raise ArgumentError(
            f"`compile` is '{compile}', for which `torch.compile` needs {lacking}; install that, or set `compile` to "
            f"'off'."
        )


def _lacking(device: torch.device) -> Iterator[str]:
    if device.type == "cpu":
        fault = cpp_compiler_fault()
        if fault:
            yield f"a C++ compiler, such as g++ or clang++, on the path or named by the variable CXX, but: {fault}"
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            yield f"Python's headers (python3-dev), but there is no {header}"
        return
    if find_spec("triton") is None:
        yield "the package `triton`, which is not installed"
    own: Any = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([own] if own else ["gcc", "cc", "clang"])):
        yield "a C compiler, such as gcc, on the path or named by the variable CC, and finds none"
