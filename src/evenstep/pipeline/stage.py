"""One stage of a model on its rank: its module, its activations and the reduction of its gradients.

A whole model is a model of one stage. Of a stage's outputs only the graph's edges are kept.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from evenstep.parallel.fsdp import ShardReducer
from evenstep.parallel.reducer import Reducer
from evenstep.pipeline.action import Action, Op
from evenstep.pipeline.deferred import Deferral, Work
from evenstep.pipeline.pipeline_model import PipelineModel, StageModule
from evenstep.pipeline.wire import Address, Edges, detached, tensors

Gradients = dict[int, list[list[Tensor | None]]]  # by place of a layer, for each layer that takes its output
Ends = dict[int, list[GradientEdge]]  # of outputs that leave, by place


class PlanStep(Protocol):
    """The micro-batches that go through a plan, by the plan's numbers."""

    def forward(
        self, stage: "Stage", received: Mapping[int, Any], microbatch: int
    ) -> tuple[Mapping[int, Any], Tensor | None]:
        """The outputs that leave a stage, by place, and the loss of the last stage."""
        ...

    def backward(self, loss: Tensor, microbatch: int) -> None: ...

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        """Context of the backward of a stage without a loss."""
        ...

    def done(self, microbatch: int) -> None:
        """This rank has computed all of a micro-batch."""
        ...

    def completed(self, microbatch: int) -> int | None:
        """Number of the micro-batch whose gradients this backward completes."""
        ...

    def acted(self, op: Op, /) -> None: ...


def _go_back_from(outputs: Mapping[int, Ends], gradients: Mapping[int, Gradients]) -> None:
    """Go back from outputs, by destination; gradients of several layers are added from the last to the first."""
    edges: dict[tuple[object, int], GradientEdge] = {}
    summed: dict[tuple[object, int], Tensor] = {}
    for destination in sorted(outputs, reverse=True):
        for place, ours in outputs[destination].items():
            for theirs in reversed(gradients[destination][place]):
                for edge, gradient in zip(ours, theirs, strict=True):
                    if gradient is not None:
                        key = edge.node, edge.output_nr
                        edges[key] = edge
                        summed[key] = summed[key] + gradient if key in summed else gradient
    if summed:
        torch.autograd.backward(tuple(edges.values()), tuple(summed.values()))


def _edges_of(tree: Any) -> list[GradientEdge]:
    return [get_gradient_edge(leaf) for leaf in tensors(tree) if leaf.requires_grad]


def _caught(tree: Any) -> list[Tensor | None]:
    """Gradients of the leaves of a tree, once a backward has come to them."""
    leaves = [leaf for leaf in tensors(tree) if leaf.requires_grad]
    gradients: list[Tensor | None] = [None] * len(leaves)
    for place, leaf in enumerate(leaves):
        leaf.register_hook(partial(gradients.__setitem__, place))  # `.grad` would have the strides of the leaf
    return gradients


@final
class Stage:
    """One stage of a model on this rank, or a whole model, which is then the only stage.

    Attributes:
        acts: functions of an action and the running step, by kind of action.
    """

    def __init__(
        self,
        module: nn.Module,
        reducer: Reducer,
        *,
        model: PipelineModel | None = None,
        index: int = 0,
        edges: Edges | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        self.module, self.reducer, self.index = module, reducer, index
        self.is_whole = not isinstance(module, StageModule)
        self.takes_inputs = module.takes_inputs if isinstance(module, StageModule) else True
        self.sources: tuple[int, ...] = ()
        self.carried: dict[int, tuple[int, ...]] = {}  # places of the layers whose outputs leave, by destination
        self.gives_loss = self._is_first_here = self._is_last_here = True
        if model is not None:
            self.sources = model.layout.sources(index)
            self.carried = {there: model.carried[index, there] for there in model.layout.destinations(index)}
            self.gives_loss = index == model.last_stage
            self._is_first_here, self._is_last_here = index == model.own[0], index == model.own[-1]
        self.takes_batch = self.gives_loss or self.takes_inputs
        self._collect = reducer.collect if reducer.collects or type(reducer) is not Reducer else None
        self._edges = cast("Edges", edges)
        self.deferral = deferral or Deferral()
        self._live: dict[int, tuple[dict[int, Gradients], dict[int, Ends], Tensor | None]] = {}
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
            Op.UNSHARD: lambda action, step: cast("ShardReducer", reducer).unshard(),
            Op.RESHARD: lambda action, step: cast("ShardReducer", reducer).reshard(),
        }

    def forget(self) -> None:
        """Drop all activations, after a plan that has failed."""
        self._live.clear()
        self._waiting.clear()
        self.deferral.end()

    def _forward(self, action: Action, step: PlanStep) -> None:
        microbatch = action.microbatch
        received: dict[int, list[Any]] = {}
        gradients: dict[int, Gradients] = {}
        for source in self.sources:
            address = Address("output", source, self.index, microbatch)
            tree = {place: self._copies(place, value, address) for place, value in self._edges.get(address).items()}
            gradients[source] = {place: [_caught(copy) for copy in copies] for place, copies in tree.items()}
            received |= tree
        outputs, loss = step.forward(self, received, microbatch)
        del received
        trains = torch.is_grad_enabled()
        ends: dict[int, Ends] = {}
        for destination, places in self.carried.items():
            tree = {place: outputs[place] for place in places}
            if trains:
                ends[destination] = {place: _edges_of(value) for place, value in tree.items()}
            address = Address("output", self.index, destination, microbatch)
            self._edges.put(address, detached(tree, address))
        if trains:
            self._live[microbatch] = gradients, ends, loss
        elif self._is_last_here:
            step.done(microbatch)

    def _copies(self, place: int, output: Any, address: Address) -> list[Any]:
        """The output of a layer once for each layer that takes it, all in the same memory."""
        uses = cast("StageModule", self.module).uses[place]
        return [output, *(detached(output, address) for _ in range(uses - 1))]

    def _backward(self, action: Action, step: PlanStep) -> None:
        self._go_back(action.microbatch, step)
        self._end_backward(action.microbatch, step)

    def _input_backward(self, action: Action, step: PlanStep) -> None:
        earlier = self._set_aside()
        self.deferral.waiting = []
        self._go_back(action.microbatch, step)
        self._waiting[action.microbatch] = self.deferral.end(), self._set_aside()
        self._add(earlier)

    def _weight_backward(self, action: Action, step: PlanStep) -> None:
        earlier = self._set_aside()  # gradients of earlier micro-batches of the block
        waiting, gradients = self._waiting.pop(action.microbatch)
        self._add(gradients)
        with torch.no_grad():
            for work in waiting:
                work()
        if earlier:
            gradients = self._set_aside()
            self._add(earlier)
            self._add(gradients)
        self._end_backward(action.microbatch, step)

    def _go_back(self, microbatch: int, step: PlanStep) -> None:
        gradients, ends, loss = self._live.pop(microbatch)
        if loss is not None:
            step.backward(loss, microbatch)
        elif ends:
            theirs: dict[int, Gradients] = {
                there: self._edges.get(Address("gradient", there, self.index, microbatch)) for there in ends
            }
            with step.going_back(microbatch):
                _go_back_from(ends, theirs)
        for source, caught in gradients.items():
            self._edges.put(Address("gradient", self.index, source, microbatch), caught)

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
