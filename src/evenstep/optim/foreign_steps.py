"""Refuses a step of the optimizer, or `zero_grad`, by who is told of updates: one update takes one step, its own.

A loop that was written for something else leaves such calls behind. They raise nothing, and train something else: the
same gradient once more, or without that of earlier micro-batches. Nothing is watched while an update is computed.
"""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from evenstep.errors import ArgumentError, HookError
from evenstep.internals import times_written
from evenstep.names import parameters_in
from evenstep.optim.multi import inner

_ADVICE = "leave it out: each update ends with one step, and begins without gradients"


@final
class NoSteps(AbstractContextManager[None]):
    """Inside, a step of the optimizer raises HookError.

    Args:
        what: is called inside, for people.
        sums: whether gradients are being summed, so that it raises as well where all of them are dropped.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    >>> with NoSteps(optimizer, "`after_update` of hook `Mine`", sums=False): optimizer.zero_grad()
    >>> with NoSteps(optimizer, "`after_update` of hook `Mine`", sums=False): optimizer.step()
    Traceback (most recent call last):
    evenstep.errors.HookError: `after_update` of hook `Mine` has called `step` of the optimizer, ...
    """

    __slots__ = ("_had", "_handles", "_optimizers", "_sums", "_what", "_zero_grads")

    def __init__(self, optimizer: Optimizer, what: str, *, sums: bool) -> None:
        own = inner(optimizer)
        self._optimizers: tuple[Any, ...] = own if own[0] is optimizer else (optimizer, *own)
        self._what, self._sums = what, sums

    def __enter__(self) -> None:
        self._handles = [one.register_step_pre_hook(self._refuse_step) for one in self._optimizers]
        if self._sums:
            self._had = self._has_gradients()
            self._zero_grads = [vars(one).get("zero_grad") for one in self._optimizers]
            for one in self._optimizers:
                one.zero_grad = self._refuse_zero_grad

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if self._sums:
            for one, before in zip(self._optimizers, self._zero_grads, strict=True):
                del one.zero_grad
                if before is not None:
                    one.zero_grad = before
            if self._had and error is None and not self._has_gradients():
                self._refuse_zero_grad()  # by the model's own `zero_grad`, or one by one

    def _has_gradients(self) -> bool:
        groups = self._optimizers[0].param_groups
        return any(one.grad is not None for group in groups for one in group["params"])

    def _refuse_step(self, *_: Any) -> None:
        raise HookError(
            f"{self._what} has called `step` of the optimizer, which would move the parameters beside the update; "
            f"{_ADVICE}. An optimizer of the hook's own may step parameters of its own."
        )

    def _refuse_zero_grad(self, *_: Any, **__: Any) -> None:
        raise HookError(
            f"{self._what} has called `zero_grad` in the midst of an update, which drops the gradients that it has "
            f"summed up; {_ADVICE}."
        )


@final
class NoSecondStep:
    """Between two of the first updates of a loop of one's own, a step with the gradient of the last one raises.

    A step with a gradient that was computed since is the loop's own.

    >>> import torch
    >>> weight = torch.zeros(1, requires_grad=True); weight.sum().backward()
    >>> optimizer = torch.optim.SGD([weight]); watch = NoSecondStep(optimizer); watch.begin()
    >>> optimizer.step()
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `step` of the optimizer was called after `engine.update`, ...
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._rest = 3  # updates after which it is watched: a loop that steps by itself does so from the first on
        self._used: tuple[Tensor, Tensor, int] | None = None  # a parameter, its gradient, and how often that is written
        self._handle: Any = None

    def begin(self) -> None:
        """An update has been committed."""
        if not self._rest:
            return
        self._rest -= 1
        for parameter in parameters_in(self._optimizer):
            if (gradient := parameter.grad) is not None:
                self._used = parameter, gradient, times_written(gradient)
                self._handle = self._optimizer.register_step_pre_hook(self._refuse)
                return

    def end(self) -> None:
        """Another is made."""
        if self._handle is not None:
            self._handle.remove()
            self._used = self._handle = None

    def _refuse(self, *_: Any) -> None:
        assert self._used is not None, "it is watched"
        parameter, gradient, times = self._used
        if parameter.grad is gradient and times_written(gradient) == times:
            raise ArgumentError(
                f"`step` of the optimizer was called after `engine.update`, which has taken the step with this "
                f"gradient already; {_ADVICE}."
            )
        self.end()
