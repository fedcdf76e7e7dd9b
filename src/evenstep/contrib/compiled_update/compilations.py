"""Compiles functions of tensors as one graph each; a known graph is run by torch's guards alone."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from threading import get_ident
from typing import Any, NamedTuple, cast, final

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

    def __init__(self) -> None:
        super().__init__(
            "torch's compiler is switched off (`TORCH_COMPILE_DISABLE`, or `torch.compiler.set_stance`), but `compile` "
            "is 'update'; switch it on, or set `compile` to 'off'."
        )


def compile_graph(graph: Any, inputs: Sequence[Any], *, captured: bool) -> Callable[..., Any]:
    options = compile_options(captured=captured)
    compile_fx = cast("Any", import_module("torch._inductor.compile_fx")).compile_fx
    return compile_fx(graph, inputs, config_patches=options)


class Inductor:
    """torch's compiler as a backend that counts its graphs.

    Args:
        captured: whether CUDA launches all kernels of a graph at once.

    Attributes:
        graphs: number of graphs that it has compiled.
        refuses: whether it raises NotCompiledError instead of compiling.
    """

    def __init__(self, *, captured: bool = False) -> None:
        self._captured = captured
        self.graphs = 0
        self.refuses = False

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.refuses:
            raise NotCompiledError
        self.graphs += 1
        return compile_graph(graph, inputs, captured=self._captured)


def only_compiled() -> None:
    """Raise NotCompiledError where Python runs this: the first line of a function given to `as_compiled`."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotCompiledError


def as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the graph that `torch.compile` has made of a function, if its guards hold; else Python runs the function.

    The callable that `torch.compile` returns prepares to compile at each call, which takes half of the time until the
    graph runs. It also counts its calls, which captured CUDA graphs need.
    """
    follow = cast("Any", import_module("torch._dynamo.eval_frame")).set_eval_frame

    def run(*args: Any) -> Any:
        before = follow(False)  # use compiled code, and compile nothing
        try:
            return function(*args)
        finally:
            follow(before)

    return run


def guards_kept(guards: Sequence[Any], given: Sequence[str]) -> list[bool]:
    """Selects the guards of torch that are evaluated at each call.

    Guards on torch's, Python's and this package's modules are left out, and those on `torch.func` transforms and
    saved-tensor hooks around the call, as there are none. Together they are most of the time.

    Args:
        guards: as the option `guard_filter_fn` of `torch.compile` gives them.
        given: the arguments, or attributes of these ("step", "gradients.context"), that never change.
    """
    kept: list[bool] = []
    for guard in guards:
        name = _LOCAL.sub(r"\1", _WRAPPED.sub("", str(guard.name)))
        ours = any(name == one or name.startswith((f"{one}.", f"{one}[", f"{one})")) for one in given)
        kept.append(not ours and not name.startswith(_FIXED) and guard.guard_type not in _NEVER_OTHERWISE)
    return kept


def keep_address(tensors: Sequence[Tensor]) -> None:
    """Tell torch's compiler that tensors stay where they are: a captured graph then writes to them without copies."""
    mark = cast("Any", import_module("torch._dynamo")).mark_static_address
    for tensor in tensors:
        mark(tensor)


def is_compile_error(error: Exception) -> bool:
    """True if the compiler raised the error, and not the compiled code: by the module of its class."""
    return any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__)


_COMPILED = Inductor()
_CAPTURED = Inductor(captured=True)


class Compiled(NamedTuple):
    """A function as one graph: `known` runs a graph for such arguments or raises NotCompiledError, `anew` compiles."""

    known: Callable[..., Any]
    anew: Callable[..., Any]


@final
class Compilations:
    """Compiles functions of tensors.

    Args:
        device: on CUDA each graph is captured, so that it is launched as one.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = 0
        self._inductor = _CAPTURED if device.type == "cuda" else _COMPILED
        self._begun: set[int] = set()

    @property
    def captures(self) -> bool:
        """True if a graph's next run overwrites its outputs, and its inputs should keep their addresses."""
        return self._inductor is _CAPTURED

    @property
    def total(self) -> int:
        """Number of graphs that were compiled in this process."""
        return self._inductor.graphs

    def compile(self, function: Any, given: Sequence[str]) -> Compiled:
        """A function, which calls `only_compiled` first, as one graph; it is compiled when it is first run.

        torch finds compiled graphs by a function's code. Each function gets its own code here: since some guards are
        left out, the graph of another model would be taken for this one's.

        Args:
            given: the arguments and attributes that never change; see `guards_kept`.
        """
        function.__code__ = function.__code__.replace()
        options = cast("Any", {"guard_filter_fn": partial(guards_kept, given=given)})
        backend = cast("Any", self._inductor)
        anew = torch.compile(function, dynamic=False, fullgraph=True, backend=backend, options=options)
        return Compiled(as_compiled(function), anew)

    def known(self, compiled: Compiled, args: Sequence[Any]) -> Any:
        """Run the graph that was compiled for such arguments.

        Raises:
            NotCompiledError: there is none; nothing has happened.
        """
        if self._thread != get_ident():  # torch keeps its settings by thread
            compile_each_shape()
            self._thread = get_ident()
        if id(compiled.anew) not in self._begun:
            raise NotCompiledError
        if not self.captures:
            return compiled.known(*args)
        self._inductor.refuses = True
        try:
            return compiled.anew(*args)
        except Exception as error:
            if is_compile_error(error):
                raise NotCompiledError from error
            raise
        finally:
            self._inductor.refuses = False

    def run(self, compiled: Compiled, args: Sequence[Any]) -> Any:
        try:
            return self.known(compiled, args)
        except NotCompiledError:
            pass  # torch's errors would else be raised "during handling of" it
        output = compiled.anew(*args)
        self._begun.add(id(compiled.anew))
        return output
