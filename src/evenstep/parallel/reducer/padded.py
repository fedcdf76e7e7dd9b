"""Shards that each pass gathers: all ranks must run the same passes, with the same collectives in each.

A rank with fewer micro-batches than its peers runs some again, in dummy passes whose gradients are replaced by zeros
before anyone adds them. How gradients are reduced is the variants'.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evenstep.internals.fsdp import (
    at_end_of_backward,
    forget_order,
    parts,
    record,
)
from evenstep.parallel.collective_order import CollectiveOrder
from evenstep.parallel.reducer.sharded import Sharded, ShardedReducer
from evenstep.parallel.shardable import explained

T = TypeVar("T")


class PaddedReducer(ShardedReducer):
    """Shards of a module that each pass gathers; the arguments are those of `ShardedReducer`.

    All ranks run micro-batches of one kind (of one task) at the same time, kinds in turn.
    """

    def __init__(self, module: nn.Module, strategy: Sharded) -> None:
        super().__init__(module, strategy)
        self._muted = False
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind
        self._order = CollectiveOrder(strategy.group)
        self._dummy: Callable[[], None]  # runs a dummy pass

    def begin(self) -> None:
        self._order.reset()
        self._reset()

    def relearn(self) -> None:
        """After a failed try: forget the order in which passes gather, of which ranks may know different parts."""
        self._order.forget()

    def pad_passes(self, work: Sequence[T], run: Callable[[T], None], *, backward: bool, kind: str, last: bool) -> None:
        """Before an update's or an evaluation's passes: run dummy passes, until all ranks run the same number.

        Args:
            work: this rank's micro-batches, or what they are cut into.
            run: runs a micro-batch without a trace: no metrics, no changed buffers. What it adds to gradients is
                removed here.
            backward: whether passes come back.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: whether no passes of another kind follow in this accumulation.
        """
        self._order.end_pass()
        here = [0.0] * (2 * self.group.ranks)
        example: Any = work[0] if work else self._examples.get(kind)
        here[self.group.rank], here[self.group.ranks + self.group.rank] = len(work), float(example is not None)
        told = self.group.sum_floats(here)
        counts, have = told[: self.group.ranks], told[self.group.ranks :]
        self._order.reset(kind)
        if not any(counts):
            return
        if not all(have):
            giver = have.index(1.0)
            given = self.group.gather(example if self.group.rank == giver else None)[giver]
            example = given if example is None else example
        self._examples[kind] = example
        self._dummy = partial(self._run_dummy, example, run)
        missing = int(max(counts)) - len(work)
        owed = backward and last and not work and missing > 0
        accumulated = any(self._present)  # by other kinds
        for _ in range(missing - owed):
            self._dummy()
            if not accumulated:  # else zeros have been added
                self._forget_gradients()
        if owed:
            self._owe()

    @abstractmethod
    def _owe(self) -> None:
        """This rank has no micro-batch: `_dummy` must take the place of its last backward, in which others reduce."""

    def _run_dummy(self, example: T, run: Callable[[T], None]) -> None:
        """Run a pass whose gradients are zeros."""
        self._muted = True
        try:
            run(example)
        finally:
            self._muted = False

    def explained(self, error: Exception) -> Exception:
        """What an error of torch's in a pass means; `error` itself if nothing more is known."""
        return explained(error, dict(self.module.named_parameters(remove_duplicate=False)))

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        super().share(parameters)
        self._order.forget()

    def _prepare(self) -> None:
        super()._prepare()
        self._order_collectives()

    def _order_collectives(self) -> None:
        """Let all ranks run the same collectives in each pass, whatever parts each of them runs."""
        before: Any = None
        for name, part in parts(self.module):
            # By itself FSDP2 gathers ahead, in a backward, what went forward before on this rank: each its own.
            part.set_modules_to_backward_prefetch([before or part])
            at_end_of_backward(part, self._order.gradients_complete)
            if (of_part := record(part)) is not None:
                self._order.add(part, of_part, name, alone=self._strategy.layout.num_shards == 1)
            if self.group.device.type != "cpu":  # there, nothing is gathered while something is computed
                before = part
        if before is not None:
            self._fsdp.set_modules_to_backward_prefetch([before])
        # FSDP2's own hooks are not compiled either
        self._fsdp.register_forward_pre_hook(torch.compiler.disable(self._begin_pass), prepend=True)
        self._fsdp.register_forward_hook(torch.compiler.disable(self._end_forward))

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if self._muted else super()._seen(number, gradient)

    def _begin_pass(self, *_: Any) -> None:
        """Let all passes be alike: what FSDP2 remembers of those before would make it gather at other times."""
        self._order.begin_forward()
        forget_order(self.module)

    def _end_forward(self, *_: Any) -> None:
        self._order.begin_backward()
