"""Optimizers that train one set of parameters and evaluate another: schedule-free ones, with `train()` and `eval()`.

After an evaluation the parameters have their former bits, since a way back by arithmetic would round.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from evenstep.optim.multi import inner


@final
class Modes:
    """Modes of an optimizer.

    Args:
        parameters: parameters of the model on this rank.
        fetch: fetches the parameters that other ranks have changed.

    Attributes:
        names: classes of the optimizers with modes.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], fetch: Callable[[], None]) -> None:
        self._optimizers: list[Any] = [one for one in inner(optimizer) if has_modes(one)]
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
        """Inside, the model has the parameters to evaluate."""
        kept = [parameter.detach().clone() for parameter in self._parameters]
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


def has_modes(optimizer: Optimizer) -> bool:
    """True if the optimizer has `train()` and `eval()`."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
