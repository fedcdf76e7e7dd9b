"""One stage of a model on its rank: its module, its edges, its activations and how its gradients are reduced.

A stage does each action of a plan (`acts`). A whole model is a model of one stage without edges.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from evenstep.errors import PlanError
from evenstep.parallel.fsdp import PlanReducer
from evenstep.parallel.reducer import Reducer
from evenstep.pipeline.action import Action, Op
from evenstep.pipeline.boundary import Crossing, Gradients, detached
from evenstep.pipeline.deferred import Deferral, Work, accumulate
from evenstep.pipeline.layers import arguments
from evenstep.pipeline.pipeline_model import StageModule
from evenstep.pipeline.wire import Address, Edges


class PlanStep(Protocol):
    """The micro-batches that go through a plan, asked for by stages under the plan's numbers."""

    def forward(
        self, stage: "Stage", received: Mapping[int, Any], microbatch: int
    ) -> tuple[Mapping[int, Any], Tensor | None]:
        """Apply a stage; gives the outputs that leave it, and the loss where the stage gives one."""
        ...

    def backward(self, loss: Tensor, microbatch: int) -> None:
        """Go back from the loss: add to the gradients of the stage's parameters."""
        ...

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        """Around the backward of a stage that gives no loss."""
        ...

    def done(self, microbatch: int) -> None:
        """This rank has nothing more to compute of the micro-batch."""
        ...

    def completed(self, microbatch: int) -> int | None:
        """The number of the micro-batch whose gradients are complete with this one's backward; None: of none yet."""
        ...

    def acted(self, op: Op, /) -> None:
        """An action of this kind was done."""
        ...


@final
class Stage:
    """One stage of a model.

    Args:
        module: a `StageModule`, or a whole model, which is then the only stage.
        reducer: how the module's gradients are shared between data-parallel ranks.
        index: number of the stage in the whole model, counted from 0.
        edges: through which outputs and gradients come and go; only a stage without neighbours needs none.
        sources: the stages whose outputs it takes.
        carried: for each stage that takes outputs of it, the places of the layers that give them.
        gives_loss: whether its output goes to the task's loss.
        is_first_here: whether no earlier stage is on this rank.
        is_last_here: whether no later stage is on this rank.
        deferral: of this rank's weight gradients, where backwards are split.

    Attributes:
        acts: what it does, by the kinds of action; each is called with the action and the step that runs.
        apply: the module as it is called: with received outputs, the task's inputs, and what is told before each layer.
        takes_inputs: whether it is called with the task's inputs.
        takes_batch: whether it needs the task's batch: for those, or for the loss.
        is_whole: whether it is all of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        reducer: Reducer,
        *,
        index: int = 0,
        edges: Edges | None = None,
        sources: Sequence[int] = (),
        carried: Mapping[int, Sequence[int]] | None = None,
        gives_loss: bool = True,
        is_first_here: bool = True,
        is_last_here: bool = True,
        deferral: Deferral | None = None,
    ) -> None:
        self.module, self.reducer, self.index = module, reducer, index
        self.sources, self.carried = tuple(sources), dict(carried or {})
        if isinstance(module, StageModule):
            self.is_whole, self.apply, self.takes_inputs = False, module, module.takes_inputs
        else:
            self.is_whole, self.apply, self.takes_inputs = True, partial(_apply_whole, module), True
        self.gives_loss, self.takes_batch = gives_loss, gives_loss or self.takes_inputs
        self._collect = None if type(reducer).collect is Reducer.collect else reducer.collect
        self._edges = cast("Edges", edges)
        self._is_first_here, self._is_last_here = is_first_here, is_last_here
        self._deferral = deferral or Deferral()
        self._live: dict[int, Crossing] = {}
        self._waiting: dict[int, tuple[list[Work], list[Tensor | None]]] = {}
        self.acts: Mapping[Op, Callable[[Action, PlanStep], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT_BACKWARD: self._input_backward,
            Op.WEIGHT_BACKWARD: self._weight_backward,
            Op.SEND_OUTPUT: lambda action, step: self._edges.send(action),
            Op.SEND_GRADIENT: lambda action, step: self._edges.send(action),
            Op.RECEIVE_INPUT: lambda action, step: self._edges.receive(action),
            Op.RECEIVE_GRADIENT: lambda action, step: self._edges.receive(action),
            Op.ARM: lambda action, step: reducer.arm(),
            Op.REDUCE: lambda action, step: reducer.reduce(),
            Op.UNSHARD: lambda action, step: cast("PlanReducer", reducer).unshard(),
            Op.RESHARD: lambda action, step: cast("PlanReducer", reducer).reshard(),
        }

    def forget(self) -> None:
        """Let go of all activations, after a plan that has failed."""
        self._live.clear()
        self._waiting.clear()

    def _forward(self, action: Action, step: PlanStep) -> None:
        microbatch, crossing = action.microbatch, Crossing()
        received: dict[int, Any] = {}
        for source in self.sources:
            tree = self._edges.take(Address("output", source, self.index, microbatch))
            crossing.enter(source, tree)
            received |= tree
        outputs, crossing.loss = step.forward(self, received, microbatch)
        del received
        trains = torch.is_grad_enabled()
        for destination, places in self.carried.items():
            tree = {place: outputs[place] for place in places}
            if trains:
                crossing.leave(destination, tree)
            address = Address("output", self.index, destination, microbatch)
            self._edges.leave(address, detached(tree, address))
        if trains:
            self._live[microbatch] = crossing
        elif self._is_last_here:
            step.done(microbatch)

    def _backward(self, action: Action, step: PlanStep) -> None:
        self._go_back(action.microbatch, step)
        self._end_backward(action.microbatch, step)

    def _input_backward(self, action: Action, step: PlanStep) -> None:
        earlier = self._set_aside()
        self._deferral.begin()
        self._go_back(action.microbatch, step)
        self._waiting[action.microbatch] = self._deferral.end(), self._set_aside()
        self._add(earlier)

    def _weight_backward(self, action: Action, step: PlanStep) -> None:
        earlier = self._set_aside()  # of the block: what is computed now is added to it
        waiting, gradients = self._waiting.pop(action.microbatch)
        self._add(gradients)
        accumulate(waiting)
        if earlier:
            gradients = self._set_aside()
            self._add(earlier)
            self._add(gradients)
        self._end_backward(action.microbatch, step)

    def _go_back(self, microbatch: int, step: PlanStep) -> None:
        crossing = self._live.pop(microbatch, None)
        if crossing is None:
            raise PlanError(
                f"micro-batch {microbatch} has no graph: gradients were switched off when its forward ended; use "
                f"`with torch.no_grad():` instead of `torch.set_grad_enabled(False)`."
            )
        if crossing.loss is not None:
            step.backward(crossing.loss, microbatch)
            crossing.loss = None
        elif self.carried:
            gradients: dict[int, Gradients] = {
                destination: self._edges.take(Address("gradient", destination, self.index, microbatch))
                for destination in self.carried
            }
            with step.going_back(microbatch):
                crossing.backward(gradients)
        for source in self.sources:
            self._edges.leave(Address("gradient", self.index, source, microbatch), crossing.returned(source))

    def _set_aside(self) -> list[Tensor | None]:
        if not self.reducer.collects:
            return []
        parameters = list(self.module.parameters())
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def _add(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.module.parameters(), gradients, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _end_backward(self, microbatch: int, step: PlanStep) -> None:
        if self._is_first_here:
            step.done(microbatch)
        if self._collect is not None and (complete := step.completed(microbatch)) is not None:
            self._collect(complete)


def _apply_whole(
    model: nn.Module, received: Mapping[int, Any], inputs: Any, begin: Callable[[int], None]
) -> dict[int, Any]:
    if isinstance(inputs, Tensor):  # asked first: it is the commonest
        return {0: model(inputs)}
    positional, named = arguments((), inputs, True)
    return {0: model(*positional, **named)}
