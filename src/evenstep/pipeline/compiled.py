"""Modules whose forwards are compiled in place, so that names and hooks stay.

Each shape is compiled by itself, for equal bits after a resume.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any, final

import torch
from torch import nn

from evenstep.internals import compile_options


@final
class CompiledForward:
    """The forward of one module, compiled for each new shape. A copy of the module has a plain one."""

    def __init__(self, module: nn.Module) -> None:
        self.own = vars(module).get("forward")  # a forward of the object, which `release` puts back
        self.__wrapped__: Callable[..., Any] = module.forward  # whose arguments it takes
        self._compiled = torch.compile(self.__wrapped__, dynamic=False, options=compile_options())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _same, (self.__wrapped__,)


def compile_in_place(module: nn.Module) -> None:
    module.forward = CompiledForward(module)


def is_compiled(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), CompiledForward)


def release(model: nn.Module) -> None:
    """Give the modules of a model their own forwards back, as another engine may have compiled them."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, CompiledForward):
            del module.forward
            if forward.own is not None:
                module.forward = forward.own


# torch's stance is of the whole process, from when the first thread enters until the last one has left
_LOCK, _STANCE = Lock(), ExitStack()
_inside = 0  # number of threads inside


@contextmanager
def as_written() -> Generator[None]:
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


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
