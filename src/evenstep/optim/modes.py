"""Optimizers that train one set of parameters and evaluate another: schedule-free ones, with `train()` and `eval()`."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from evenstep.optim.optimizers import parts_of


@final
class Modes:
    """Modes of an optimizer; `fetch` fetches the parameters that other ranks have changed."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], fetch: Callable[[], None]) -> None:
        self._optimizers: list[Any] = moded(optimizer)
        self._parameters = list(parameters) if self._optimizers else []
        self._fetch = fetch
        self.names = [type(one).__name__ for one in self._optimizers]

    def train(self) -> None:
        self._switch("train")

    def evaluate(self) -> None:
        """Switch to the parameters to evaluate, for good; `evaluating` goes back."""
        self._switch("eval")

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Inside, the model has the parameters to evaluate. Afterwards it has its former bits."""
        kept = [parameter.detach().clone() for parameter in self._parameters]  # a way back by arithmetic would round
        self.evaluate()
        try:
            yield
        finally:
            self.train()
            with torch.no_grad():
                for parameter, value in zip(self._parameters, kept, strict=True):
                    parameter.copy_(value)

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        for one in self._optimizers:
            getattr(one, mode)()
        if self._optimizers:
            self._fetch()


def moded(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers with `train()` and `eval()`."""
    return [one for one in parts_of(optimizer) if all(callable(getattr(one, mode, None)) for mode in ("train", "eval"))]
