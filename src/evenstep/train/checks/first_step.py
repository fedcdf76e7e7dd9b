"""Looks at the first step of an optimizer: whether it has changed anything, and nothing that a run would lose.

A step that changes none of its parameters, though their gradients are not zero, is said once: the class may do nothing,
put it off, or move by less than the number format can hold. Which of several parameters a step should have changed, and
by how much, nobody but its author knows; that is not judged. What no checkpoint would hold, and parameters that are no
longer where shards are gathered from, are refused. Later steps cost one call more.
"""

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError, clause
from evenstep.events import Incident
from evenstep.internals import local_tensor
from evenstep.memory import is_out_of_memory
from evenstep.names import named_parameters
from evenstep.optim.low_bit import is_low_bit
from evenstep.optim.multi import inner
from evenstep.optim.stepping import Steps
from evenstep.parallel.layout import ParameterLayout

_DENSE = (
    "Take another optimizer, build the layer without `sparse=True`, or give that parameter to an optimizer that can: "
    "`MultiOptimizer(…, torch.optim.SparseAdam(…))` of `evenstep.optim`."
)
_KEPT_BYTES = 2**16  # of a larger tensor only the sum of its bits is kept
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class FirstStep(Steps):
    """Takes steps, and looks at the first one.

    Args:
        report: told of a step that changes nothing.
        fault: why no run could go on from a checkpoint; asked after the step, where checkpoints are saved.

    >>> from evenstep.parallel import Group
    >>> weight = nn.Linear(1, 1, bias=False)
    >>> class Idle(torch.optim.SGD):
    ...     def step(self, closure=None): ...
    >>> said = []
    >>> first = FirstStep(Steps(), weight, ParameterLayout(Group()), said.append)
    >>> weight(torch.ones(1)).backward(); first(Idle(weight.parameters(), lr=0.1), 1)
    >>> said[0].message
    'the step of update 1 has changed none of the 1 parameters of Idle, though their gradients are not zero: ...'
    """

    def __init__(
        self,
        steps: Steps,
        model: nn.Module,
        layout: ParameterLayout,
        report: Callable[[Incident], None],
        fault: Callable[[], str] | None = None,
    ) -> None:
        self._steps, self._model, self._layout, self._report, self._fault = steps, model, layout, report, fault
        self._is_first = True

    def __call__(self, optimizer: Any, update: int) -> None:
        """Take the step of update `update`.

        Raises:
            OutOfMemoryError: there is no room for it.
            ArgumentError: it has put other tensors in the place of parameters that are cut over ranks, or changed what
                no checkpoint will hold, or it can't step sparse gradients.
        """
        if not self._is_first:
            self._steps(optimizer, update)
            return
        moving = [one for one, rate in _held(optimizer) if _moves(rate) and _has_gradient(one)]
        watched = [local_tensor(one) for one in moving]
        watched += [local_tensor(one) for one in self._steps.masters.values()]
        before = [(one.data_ptr(), _seen(one)) for one in watched]
        try:
            self._steps(optimizer, update)
        except RuntimeError as error:
            if not is_out_of_memory(error) and (fault := self._of_sparse(optimizer)):
                raise ArgumentError(
                    f"{fault}: {clause(str(error).splitlines()[0].partition('. ')[0])}. {_DENSE}"
                ) from error
            raise
        self._is_first = False
        if self._fault is not None and (fault := _of_no_format(optimizer) or self._fault()):
            raise ArgumentError(f"the checkpoints of this run could not be resumed: {fault}.")
        if self._layout.divides == "elements":
            self._check_places(optimizer, moving, [place for place, _ in before])
        elif (
            self._layout.divides == "nothing"
            and moving
            and all(torch.equal(kept, _seen(one)) for one, (_, kept) in zip(watched, before, strict=True))
        ):
            self._report(_idle(optimizer, len(moving), update))

    def _of_sparse(self, optimizer: Any) -> str:
        """Which parameters an optimizer can't step, if it was their gradients' being sparse that made it raise."""
        sparse = {id(one) for one, _ in _held(optimizer) if one.grad is not None and one.grad.is_sparse}
        names = [name for name, one in named_parameters(self._model).items() if id(one) in sparse]
        kinds = " and ".join(type(one).__name__ for one in inner(optimizer))
        return f"{kinds} can't step `{names[0]}`, whose gradient is sparse" if names else ""

    def _check_places(self, optimizer: Any, moving: list[Tensor], before: list[int]) -> None:
        """Raise ArgumentError where a parameter in shards has become another tensor, of which they know nothing."""
        names = {id(one): name for name, one in named_parameters(self._model).items()}
        for one, place in zip(moving, before, strict=False):
            if local_tensor(one).data_ptr() != place:
                raise ArgumentError(
                    f"the step of {type(optimizer).__name__} has put another tensor in the place of `"
                    f"{names.get(id(one), 'a parameter')}` (`parameter.data = …`), but with `fsdp` the model is "
                    f"gathered from the one that was there; let it write in place (`parameter.copy_(…)`), or share "
                    f"gradients by `ddp`."
                )


def _held(optimizer: Any) -> Iterator[tuple[Tensor, Any]]:
    for group in optimizer.param_groups:
        for one in group["params"]:
            yield one, group.get("lr")


def _moves(rate: Any) -> bool:
    """Whether a step at this rate moves something; at None an optimizer finds its rate by itself."""
    return rate is None or bool(rate > 0)


def _has_gradient(parameter: Tensor) -> bool:
    if parameter.grad is None or parameter.is_meta:
        return False
    gradient = local_tensor(parameter.grad)
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def _seen(tensor: Tensor) -> Tensor:
    """What tells whether a tensor has changed: a copy, or the sum of its bits."""
    value = tensor.detach()
    if value.nbytes <= _KEPT_BYTES or type(value) not in (Tensor, nn.Parameter):
        return value.clone()
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.view(_BITS[real.itemsize]).sum()


def _of_no_format(optimizer: Any) -> str:
    """What of the state is sparse, or a tensor of somebody's own kind, for which files have no format; else ""."""
    for one in inner(optimizer):
        for state in one.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.layout is not torch.strided:
                    return (
                        f"`{name}` in the state of {type(one).__name__} is sparse, for which files have no format; "
                        f"keep it dense (`.to_dense()`), build the layer without `sparse=True`, or keep no checkpoints "
                        f"(no `folder`)"
                    )
                is_own = isinstance(value, Tensor) and type(value).__module__.partition(".")[0] != "torch"
                if is_own and not is_low_bit(value):
                    return (
                        f"`{name}` in the state of {type(one).__name__} is a {type(value).__name__}, for which files "
                        f"have no format; keep no checkpoints (no `folder`), or take an optimizer of plain tensors"
                    )
    return ""


def _idle(optimizer: Any, count: int, update: int) -> Incident:
    name = type(optimizer).__name__
    return Incident(
        kind="idle_step",
        update=update,
        message=(
            f"the step of update {update} has changed none of the {count} parameters of {name}, though their gradients "
            f"are not zero: either `step` of {name} does nothing (yet), or it moves them by less than their number "
            f"format can hold; look at it, or raise the learning rate."
        ),
    )
