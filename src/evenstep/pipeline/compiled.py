"""Blocks of a model whose forwards are compiled, one by one and in place: `module.forward` is what changes.

So names of parameters stay, hooks around a block run as they always do (keys of dropout, shards that are gathered), and
blocks of one class share what was compiled. Each shape is compiled by itself: what computes a shape is then a function
of that shape, not of those that came before, and a run that is resumed has the bits of one that was not. Random numbers
are drawn as without compiling. What is compiled, and where, is `evenstep.train.compiled`'s to choose.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.errors import TaskError, clause
from evenstep.internals import pytree
from evenstep.internals.compiler import (
    NotCompiledError,
    cache_folder,
    compile_graph,
    graph_breaks,
    is_compile_error,
)


class Made(NamedTuple):
    """That a call has compiled something.

    Args:
        block: its name.
        called_with: the shapes and formats of the tensors, and in which modes.
        parts: of how many graphs it is made.
        breaks: what torch says of why there are several, where it says anything new.
    """

    block: str
    called_with: str
    parts: int
    breaks: tuple[str, ...]


@final
class Inductor:
    """torch's compiler, which counts what it compiles.

    One for the process, as torch's cache of compiled code is: with another one it would compile all anew.

    Args:
        captured: whether each graph's kernels are launched as one; see `internals.compile_graph`.

    Attributes:
        graphs: how many it has compiled.
        refuses: whether it raises NotCompiledError instead of compiling.
    """

    def __init__(self, *, captured: bool = False) -> None:
        self.graphs, self._captured, self.refuses = 0, captured, False
        self.codes: set[object] = set()  # of the forwards of which something is compiled
        self.breaks: set[str] = set()  # that have been told

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.refuses:
            raise NotCompiledError
        self.graphs += 1
        return compile_graph(graph, inputs, captured=self._captured)


_INDUCTOR = Inductor()


@final
class CompiledForward:
    """The forward of one module, compiled when it is called with new shapes. A copy of the module has a plain one.

    Args:
        name: of the module, for people.
        made: to which it is appended that something was compiled.
    """

    def __init__(self, module: nn.Module, name: str, made: list[Made]) -> None:
        self.name, self._made = name, made
        self._module = module
        self._own = vars(module).get("forward")  # somebody has put there
        self.__wrapped__: Callable[..., Any] = module.forward  # whose arguments it takes
        self._compiled = torch.compile(self.__wrapped__, dynamic=False, backend=cast("Any", _INDUCTOR))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = _INDUCTOR.graphs
        try:
            output = self._compiled(*args, **kwargs)
        except Exception as error:
            if not is_compile_error(error):
                raise
            raise TaskError(
                f"{described(self.name, self._module)} can't be compiled: {clause(reason_of(error))}. Set `compile` "
                f"to 'off' to train it as it is written."
            ) from error
        if _INDUCTOR.graphs != graphs:
            self._note(args, kwargs, _INDUCTOR.graphs - graphs)
        return output

    @property
    def has_compiled(self) -> bool:
        """Whether anything of the code was compiled, for this module or another of its class."""
        return _code(self.__wrapped__) in _INDUCTOR.codes

    def release(self) -> None:
        """Give the module back its forward."""
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own

    def _note(self, args: Any, kwargs: Any, graphs: int) -> None:
        _INDUCTOR.codes.add(_code(self.__wrapped__))
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        modes = "with gradients" if torch.is_grad_enabled() else "without gradients"
        shapes = ", ".join(f"{[*one.shape]} {format_name(one.dtype)}" for one in tensors)
        breaks = tuple(one for one in graph_breaks() if one not in _INDUCTOR.breaks)
        _INDUCTOR.breaks.update(breaks)
        self._made.append(Made(self.name, f"{shapes} {modes}", graphs, breaks))

    def __reduce__(self) -> Any:
        return _same, (self.__wrapped__,)


def compile_in_place(module: nn.Module, name: str, made: list[Made]) -> CompiledForward:
    """Compile a module's forward; see `CompiledForward`."""
    forward = CompiledForward(module, name, made)
    module.forward = forward
    return forward


def is_compiled(module: nn.Module) -> bool:
    """Whether its forward is compiled here."""
    return isinstance(vars(module).get("forward"), CompiledForward)


def release(model: nn.Module) -> None:
    """Give the modules of a model their own forwards back, as another engine may have compiled them."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, CompiledForward):
            forward.release()


@contextmanager
def as_written() -> Generator[None]:
    """Inside, whatever torch has compiled runs as it was written, and nothing is compiled."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled
        yield
        return
    global _inside
    with _LOCK:
        if not _inside:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _STANCE.close()


# torch's stance is of the whole process, from when the first thread enters until the last one has left: each by itself
# would put back the stance that it found, which may be another's
_LOCK, _STANCE = Lock(), ExitStack()
_inside = 0  # how many threads are


def described(name: str, module: nn.Module) -> str:
    """A module in words.

    >>> described("blocks.0", nn.ReLU()), described("", nn.ReLU())
    ('`blocks.0` (ReLU)', 'the model (ReLU)')
    """
    return f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _code(forward: Callable[..., Any]) -> object:
    function = getattr(forward, "__func__", forward)
    return getattr(function, "__code__", function)


def reason_of(error: Exception) -> str:
    """What torch says first of why it can't compile something, and what it explains that by."""
    of_compiler = getattr(error, "inner_exception", None)  # and not of what torch reads of the code before
    error = of_compiler or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    said = f"{lines[0]}: {explained}" if explained else lines[0]
    if of_compiler is None:
        return said
    return f"{said} (if it could be compiled before, files of torch's cache may be damaged: delete {cache_folder()})"


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
