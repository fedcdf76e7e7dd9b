"""Executes the plans of a model in stages.

It walks the actions of its rank's plan: a computation takes what it needs from the inbox or from another stage of this
rank, and leaves what others need to be sent. What a stage computes and what is done with the last one's output it asks
of the passage, how gradients are shared it leaves to the strategy; which schedule it is it does not know. A model that
is one stage takes the shorter way of `Runner`.
"""

import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import torch
from torch import Tensor

from evenstep.errors import OutOfMemoryError
from evenstep.memory import give_back, is_out_of_memory
from evenstep.names import named_parameters
from evenstep.parallel.reducer.reducer import Spoiled
from evenstep.parallel.reducers import Reducers
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.boundary import Crossing, Gradients, chosen, detached
from evenstep.pipeline.deferred import Deferral, Work, accumulate, prepare
from evenstep.pipeline.section import Section
from evenstep.pipeline.staged import Staged
from evenstep.pipeline.ties import sum_over_owners
from evenstep.pipeline.wire import Address, Inbox, Wire

SAID = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_BACKWARD: "backward to the inputs",
    Op.WEIGHT_BACKWARD: "backward to the weights",
    Op.SEND_OUTPUT: "sending the output",
    Op.RECEIVE_INPUT: "receiving the input",
    Op.SEND_GRADIENT: "sending the gradient",
    Op.RECEIVE_GRADIENT: "receiving the gradient",
    Op.ARM: "arming the reduction",
    Op.REDUCE: "reduction",
}
RECEIVED = {Op.RECEIVE_INPUT: "output", Op.RECEIVE_GRADIENT: "gradient"}


class StagePassage(Protocol):
    """What the micro-batches of one update bring along, asked for by the runner of stages."""

    def through(self, section: Section, received: Mapping[int, Any], microbatch: int) -> dict[int, Any]:
        """Apply a stage; gives the outputs that leave it."""
        ...

    def loss(self, output: Any, microbatch: int) -> Tensor | None:
        """What the last stage's output means: a loss, ready for backward, or none."""
        ...

    def descend(self, loss: Tensor, microbatch: int) -> None:
        """Go back from the loss."""
        ...

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        """Around the backward of a stage that is not the last."""
        ...

    def done(self, microbatch: int) -> None:
        """This rank has nothing more to do with the micro-batch."""
        ...

    def completed(self, microbatch: int) -> int | None:
        """The number of the micro-batch whose gradients are complete with this one's backward; None: of none yet."""
        ...


@final
class Stages:
    """Executes plans over the stages that this rank holds.

    Args:
        model: whose.
        strategy: how each stage's gradients are shared between data-parallel ranks.
        device: of the model.
    """

    def __init__(self, model: Staged, strategy: Reducers, device: torch.device) -> None:
        self.model = model
        self._strategy = strategy
        self._group = model.mesh.pipeline
        self.wire = Wire(self._group, device)
        self.deferral = Deferral()
        if model.schedule.splits_backward:
            for section in model.sections.values():
                prepare(section, self.deferral)
        for section in model.sections.values():
            strategy.wrap(section)
        self._parameters = named_parameters(model)

    def run(self, plan: Plan, passage: StagePassage, num_microbatches: int) -> None:
        """Execute `plan`. Gradients are complete, reduced and summed over ties when it returns.

        Args:
            plan: this rank's actions.
            passage: of this replica's micro-batches.
            num_microbatches: of the update, over all ranks.

        Raises:
            Spoiled: on all ranks, when one of them ran out of memory; nothing that was computed may be used.
            Exception: what an action raised, with a note that names rank, action and micro-batch; the other ranks
                of the pipeline raise an EvenstepError that says so.
        """
        run = _Run(self, self._strategy, passage, num_microbatches)
        trains = any(action.op is Op.REDUCE for action in plan)
        self.wire.begin()
        try:
            inbox = Inbox(self.wire, self._group, _coming(plan, self.model))
            self._strategy.gather()
            fault, rest = self._perform(run, plan, inbox)
            if fault is not None:
                self.deferral.end()
                run.drain(rest, inbox, failed=bool(fault))
            # what was reduced before a failure is told to other replicas only here
            concerned = self.model.mesh.world if trains else self._group
            spoiled = concerned.sum_floats([float(fault is not None)])[0] > 0
            if trains and not spoiled:
                sum_over_owners(self.model.ties, self._parameters, self._group)
            self._strategy.release()
            self.wire.flush()
        except BaseException as error:
            self.deferral.end()
            self._tell(error, run.action)
            raise
        if spoiled:
            raise Spoiled(fault or "")

    def _perform(self, run: "_Run", plan: Plan, inbox: Inbox) -> tuple[str | None, Plan]:
        """Walk the plan; gives None, or why it could not be walked to its end, and what is left of it.

        That is a traceback, or "" where another rank has failed. The error itself stays here: its traceback refers to
        all that must be freed.
        """
        done = 0
        try:
            for action in plan:
                run.act(action, inbox)
                done += 1
        except Spoiled:
            return "", plan[done:]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return traceback.format_exc(), plan[done:]
        return None, ()

    def _tell(self, error: BaseException, action: Action | None) -> None:
        place = "before its first action" if action is None else f"at {described(action)}"
        where = f"pipeline rank {self._group.rank} of {self._group.ranks} stopped {place}"
        error.add_note(f"({where})")
        mesh = self.model.mesh
        for group in (mesh.pipeline, mesh.data, mesh.world):
            group.abort(f"{where}: {type(error).__name__}: {error}")


def described(action: Action) -> str:
    """An action in words.

    >>> described(Action(Op.FORWARD, 1, 3))
    'action 1F3 (forward, stage 1, micro-batch 3)'
    """
    microbatch = f", micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"action {action} ({SAID[action.op]}, stage {action.stage}{microbatch})"


def _coming(plan: Sequence[Action], model: Staged) -> dict[int, list[Address]]:
    """For each rank what comes from it, in order."""
    coming: dict[int, list[Address]] = {}
    for action in plan:
        if action.op in RECEIVED:
            address = Address(RECEIVED[action.op], action.peer, action.stage, action.microbatch)
            coming.setdefault(model.layout.rank_of[action.peer], []).append(address)
    return coming


@final
class _Run:
    """One execution of one plan: what lives between its actions."""

    def __init__(self, stages: Stages, strategy: Reducers, passage: StagePassage, num_microbatches: int) -> None:
        self._model = stages.model
        self._wire = stages.wire
        self._deferral = stages.deferral
        self._strategy = strategy
        self._passage = passage
        self._num_microbatches = num_microbatches
        self._crossings: dict[tuple[int, int], Crossing] = {}
        self._local: dict[Address, Any] = {}
        self._leaving: dict[Address, Any] = {}
        self._weights: dict[tuple[int, int], tuple[list[Work], list[Tensor | None]]] = {}
        self._unreduced = list(self._model.own)
        self._armed: set[int] = set()
        self._complete: set[int] = set()
        self.action: Action | None = None

    def drain(self, rest: Plan, inbox: Inbox, *, failed: bool) -> None:
        """Walk the rest of the plan without computing, so that nothing is left on its way and nobody waits.

        What is received is dropped. What is sent holds nothing, by which those who receive it learn that they must do
        the same.
        """
        for held in (self._crossings, self._local, self._leaving, self._weights):
            held.clear()
        if failed:
            give_back()
        rank_of, layout = self._model.layout.rank_of, self._model.layout
        for action in rest:
            self.action = action
            op, stage, peer = action.op, action.stage, action.peer
            if op in RECEIVED:
                inbox.allow(rank_of[peer])
            elif op is Op.FORWARD:
                for source in layout.sources(stage):
                    self._drop(Address("output", source, stage, action.microbatch), inbox)
            elif op in (Op.BACKWARD, Op.INPUT_BACKWARD):
                for destination in layout.destinations(stage):
                    self._drop(Address("gradient", destination, stage, action.microbatch), inbox)
            elif op in (Op.SEND_OUTPUT, Op.SEND_GRADIENT):
                kind = "output" if op is Op.SEND_OUTPUT else "gradient"
                self._wire.send(Address(kind, stage, peer, action.microbatch), None, rank_of[peer])
            elif op is Op.REDUCE:
                self._reduce(stage, spoiled=True)

    def act(self, action: Action, inbox: Inbox) -> None:
        self.action = action
        op, stage, microbatch = action.op, action.stage, action.microbatch
        rank_of = self._model.layout.rank_of
        if op is Op.FORWARD:
            self._forward(stage, microbatch, inbox)
        elif op in (Op.BACKWARD, Op.INPUT_BACKWARD):
            self._backward(stage, microbatch, inbox, split=op is Op.INPUT_BACKWARD)
        elif op is Op.WEIGHT_BACKWARD:
            self._weight_backward(stage, microbatch)
        elif op is Op.SEND_OUTPUT:
            self._send(Address("output", stage, action.peer, microbatch), rank_of[action.peer])
        elif op is Op.SEND_GRADIENT:
            self._send(Address("gradient", stage, action.peer, microbatch), rank_of[action.peer])
        elif op in RECEIVED:
            inbox.allow(rank_of[action.peer])
        elif op is Op.ARM:
            # a reduction that begins beside the backward must not come before that of a later stage
            if not self._model.schedule.splits_backward and self._unreduced[-1] == stage:
                self._strategy.arm(self._model.sections[stage])
                self._armed.add(stage)
        else:
            self._reduce(stage)

    def _forward(self, stage: int, microbatch: int, inbox: Inbox) -> None:
        layout, crossing = self._model.layout, Crossing()
        received: dict[int, Any] = {}
        for source in layout.sources(stage):
            tree = self._arrived(Address("output", source, stage, microbatch), inbox)
            crossing.enter(source, tree)
            received |= tree
        outputs = self._passage.through(self._model.sections[stage], received, microbatch)
        del received
        train = torch.is_grad_enabled()
        for destination in layout.destinations(stage):
            tree = chosen(outputs, self._model.carried[stage, destination])
            if train:
                crossing.leave(destination, tree)
            self._leave(Address("output", stage, destination, microbatch), detached(tree))
        if stage == self._model.last:
            (output,) = outputs.values()
            crossing.loss = self._passage.loss(output, microbatch)
        if train:
            self._crossings[stage, microbatch] = crossing
        elif stage == self._model.own[-1]:
            self._passage.done(microbatch)

    def _backward(self, stage: int, microbatch: int, inbox: Inbox, *, split: bool) -> None:
        crossing = self._crossings.pop((stage, microbatch))
        gradients: dict[int, Gradients] = {
            destination: self._arrived(Address("gradient", destination, stage, microbatch), inbox)
            for destination in self._model.layout.destinations(stage)
        }
        if split:
            self._deferral.begin()
        if crossing.loss is not None:
            self._passage.descend(crossing.loss, microbatch)
            crossing.loss = None
        else:
            with self._passage.going_back(microbatch):
                crossing.backward(gradients)
        for source in self._model.layout.sources(stage):
            self._leave(Address("gradient", stage, source, microbatch), crossing.returned(source))
        if split:
            self._weights[stage, microbatch] = self._deferral.end(), self._set_aside(stage)
        else:
            self._collect(stage, microbatch)

    def _weight_backward(self, stage: int, microbatch: int) -> None:
        waiting, gradients = self._weights.pop((stage, microbatch))
        for parameter, gradient in zip(self._model.sections[stage].parameters(), gradients, strict=False):
            if gradient is not None:  # beside that of an earlier piece of the same micro-batch
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        accumulate(waiting)
        self._collect(stage, microbatch)

    def _set_aside(self, stage: int) -> list[Tensor | None]:
        """Take this micro-batch's first gradients out of the way of the next one's, where each is summed by itself."""
        if not self._strategy.collects(self._model.sections[stage]):
            return []
        parameters = list(self._model.sections[stage].parameters())
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def _collect(self, stage: int, microbatch: int) -> None:
        whole = self._passage.completed(microbatch)
        if whole is not None:
            self._strategy.collect(self._model.sections[stage], whole)
        if stage == self._model.own[0]:
            self._passage.done(microbatch)

    def _reduce(self, stage: int, *, spoiled: bool = False) -> None:
        """Reduce in one order on all data-parallel ranks, also where their plans end differently: last stage first."""
        self._complete.add(stage)
        while self._unreduced and self._unreduced[-1] in self._complete:
            last = self._unreduced[-1]
            section = self._model.sections[last]
            if spoiled:
                error = OutOfMemoryError(
                    f"memory ran out at {described(Action(Op.REDUCE, last))}, which can't be undone."
                )
                self._strategy.spoil(section, self._num_microbatches, error)
            else:
                self._reduce_one(last, section)
            self._unreduced.pop()

    def _reduce_one(self, stage: int, section: Section) -> None:
        if stage not in self._armed:
            self._strategy.arm(section)
        try:
            self._strategy.reduce(section, self._num_microbatches)
        except Spoiled:
            self._unreduced.pop()  # all have taken part
            raise

    def _arrived(self, address: Address, inbox: Inbox) -> Any:
        rank_of = self._model.layout.rank_of
        rank = rank_of[address.source]
        if rank == rank_of[address.destination]:
            return self._local.pop(address)
        tree = inbox.take(address, rank)
        self._answered(address, rank)
        if tree is None:
            raise Spoiled  # it comes from a rank that has nothing more to give
        return tree

    def _drop(self, address: Address, inbox: Inbox) -> None:
        rank_of = self._model.layout.rank_of
        rank = rank_of[address.source]
        if rank != rank_of[address.destination]:
            inbox.drop(address, rank)
            self._answered(address, rank)

    def _answered(self, address: Address, rank: int) -> None:
        """A gradient has come: the output that it belongs to had arrived."""
        if address.kind == "gradient":
            self._wire.answered(Address("output", address.destination, address.source, address.microbatch), rank)

    def _leave(self, address: Address, tree: Any) -> None:
        rank_of = self._model.layout.rank_of
        here = rank_of[address.source] == rank_of[address.destination]
        (self._local if here else self._leaving)[address] = tree

    def _send(self, address: Address, rank: int) -> None:
        self._wire.send(address, self._leaving.pop(address), rank)
