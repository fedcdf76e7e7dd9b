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
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], fetch: Callable[[], None]) -> None:
        self._optimizers: list[Any] = [one for one in inner(optimizer) if has_modes(one)]
        self._parameters = list(parameters) if self._optimizers else []
        self._fetch = fetch

    @property
    def names(self) -> list[str]:
        """Classes of the optimizers with modes."""
        return [type(one).__name__ for one in self._optimizers]

    def train(self) -> None:
        self._all("train")

    def evaluate(self) -> None:
        """Switch to the parameters to evaluate, for good; `evaluating` goes back."""
        self._all("eval")

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Inside, the model has the parameters to evaluate."""
        if not self._optimizers:
            yield
            return
        kept = [parameter.detach().clone() for parameter in self._parameters]
        self.evaluate()
        try:
            yield
        finally:
            self.train()
            with torch.no_grad():
                for parameter, value in zip(self._parameters, kept, strict=True):
                    parameter.copy_(value)

    def _all(self, mode: str) -> None:
        with torch.no_grad():
            for one in self._optimizers:
                getattr(one, mode)()
        if self._optimizers:
            self._fetch()


def has_modes(optimizer: Optimizer) -> bool:
    """True if the optimizer has `train()` and `eval()`.

    >>> has_modes(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    False
    """
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
