"""Compiles functions of tensors as one graph each; a known graph is run by torch's guards alone."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, cast, final

import torch

from evenstep.contrib.compiled_update.dynamo import (
    Inductor,
    NotCompiledError,
    as_compiled,
    guards_kept,
    is_compile_error,
)
from evenstep.internals.compiler import compile_each_shape

_COMPILED = Inductor()
_CAPTURED = Inductor(captured=True)


class Compiled(NamedTuple):
    """A function that runs as one graph.

    Args:
        known: runs a graph that was compiled for such arguments; else raises NotCompiledError.
        anew: compiles the function for such arguments, and runs that graph.
    """

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
