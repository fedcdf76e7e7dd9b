"""Compiles functions of tensors as one graph each; torch's guards select the graph of a call."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.errors import TaskError
from evenstep.internals import compile_each_shape, compile_options

_WRAPPED = re.compile(r"^(?:(?:type|dict|list|dict\.keys)\()+")
_LOCAL = re.compile(r"^L\['(\w+)'\]")
_FIXED = (
    *(f"G['__import_{module}{end}" for module in ("torch", "evenstep") for end in ("']", "_dot_")),
    *("G['__builtins", "G['__import_contextlib']", "__import__('torch')"),
)
_NEVER_OTHERWISE = ("FUNCTORCH_STACK_MATCH", "AUTOGRAD_SAVED_TENSORS_HOOKS")
_COMPILERS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "torch._subclasses.", "torch.fx.")


class NotCompiledError(TaskError):
    """A function has no graph for its arguments."""

    def __init__(self) -> None:  # the text is read where a new graph was refused
        super().__init__("torch's compiler is switched off; switch it on, or set `compile` to 'off'.")


def compile_graph(graph: Any, inputs: Sequence[Any], *, captured: bool) -> Callable[..., Any]:
    options = compile_options(captured=captured)
    compile_fx = cast("Any", import_module("torch._inductor.compile_fx")).compile_fx
    return compile_fx(graph, inputs, config_patches=options)


@final
class Inductor:
    """torch's compiler as a backend that counts its graphs.

    Attributes:
        captures: CUDA launches all kernels of a graph at once. A graph's next run then overwrites its outputs.
        graphs: number of graphs that it has compiled in this process.
        refuses: raise NotCompiledError instead of compiling.
    """

    def __init__(self, *, captures: bool) -> None:
        self.captures = captures
        self.graphs = 0
        self.refuses = False

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.refuses:
            raise NotCompiledError
        self.graphs += 1
        return compile_graph(graph, inputs, captured=self.captures)


INDUCTOR = Inductor(captures=False)
CAPTURED = Inductor(captures=True)


@final
class Compiled:
    """A function as one graph for each form of its arguments. Its first line calls `only_compiled`.

    torch finds compiled graphs by a function's code. Each function gets its own code here: since some guards are left
    out, the graph of another model would be taken for this one's.

    Args:
        given: arguments, or names in the function ("step", "gradients.context"), that never change.
    """

    def __init__(self, function: Any, given: Sequence[str], backend: Inductor) -> None:
        function.__code__ = function.__code__.replace()
        options = cast("Any", {"guard_filter_fn": partial(guards_kept, given=given)})
        self._anew = torch.compile(
            function, dynamic=False, fullgraph=True, backend=cast("Any", backend), options=options
        )
        self._function = function
        self._backend = backend
        self._follow = cast("Any", import_module("torch._dynamo.eval_frame")).set_eval_frame
        self._is_begun = False

    def known(self, *args: Any) -> Any:
        """Run the graph that was compiled for such arguments; NotCompiledError if there is none."""
        if not self._is_begun:
            raise NotCompiledError
        # The callable of `torch.compile` prepares to compile at each call, which takes half of the time until the
        # graph runs. But it also counts its calls, which captured CUDA graphs need.
        if not self._backend.captures:
            before = self._follow(False)  # use compiled code, and compile nothing
            try:
                return self._function(*args)
            finally:
                self._follow(before)
        self._backend.refuses = True
        try:
            return self._anew(*args)
        except Exception as error:
            if any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__):
                raise NotCompiledError from error
            raise
        finally:
            self._backend.refuses = False

    def __call__(self, *args: Any) -> Any:
        """Run the graph for such arguments; compile it first if there is none."""
        try:
            return self.known(*args)
        except NotCompiledError:
            pass  # torch's errors would else be raised "during handling of" it
        compile_each_shape()  # torch keeps its settings by thread
        output = self._anew(*args)
        self._is_begun = True
        return output


def only_compiled() -> None:
    """Raise NotCompiledError where Python runs this instead of a graph."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotCompiledError


def guards_kept(guards: Sequence[Any], given: Sequence[str]) -> list[bool]:
    """Choice of torch's guards that are evaluated at each call.

    Guards on torch's, Python's and this package's modules, and on `torch.func` transforms and saved-tensor hooks
    around the call, are left out. Together they are most of the time.

    Args:
        given: see `Compiled`.
    """
    kept: list[bool] = []
    for guard in guards:
        name = _LOCAL.sub(r"\1", _WRAPPED.sub("", str(guard.name)))
        ours = any(name == one or name.startswith((f"{one}.", f"{one}[", f"{one})")) for one in given)
        kept.append(not ours and not name.startswith(_FIXED) and guard.guard_type not in _NEVER_OTHERWISE)
    return kept


def keep_address(tensors: Sequence[Tensor]) -> None:
    """Tell torch's compiler that tensors stay where they are: a captured graph then writes to them without copies."""
    for tensor in tensors:
        cast("Any", import_module("torch._dynamo")).mark_static_address(tensor)
