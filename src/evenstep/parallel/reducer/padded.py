"""Shards that each pass gathers: all ranks must run the same passes, with the same collectives in each.

A rank with fewer micro-batches runs dummy passes with zero gradients; stamps of collectives are compared in each sum.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evenstep.errors import TaskError
from evenstep.internals.fsdp import count_collectives, forget_order
from evenstep.parallel.reducer.sharded import Sharded, ShardedReducer

T = TypeVar("T")
_STAMPS = 2**20  # so the squares of all ranks' stamps are summed exactly


class PaddedReducer(ShardedReducer):
    """Shards of a module that each pass gathers; the arguments are those of `ShardedReducer`.

    All ranks run micro-batches of one kind (of one task) at the same time, kinds in turn.
    """

    def __init__(self, module: nn.Module, strategy: Sharded) -> None:
        super().__init__(module, strategy)
        self._muted = False
        self._stamp = 0  # hash of the collectives since the stamps were compared
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind
        self._dummy: Callable[[], None]  # runs a dummy pass

    def begin(self) -> None:
        self._stamp = 0
        self._reset()

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
        here = [0.0] * (2 * self.group.ranks)
        example: Any = work[0] if work else self._examples.get(kind)
        here[self.group.rank], here[self.group.ranks + self.group.rank] = len(work), float(example is not None)
        told = self._summed(here)
        counts, have = told[: self.group.ranks], told[self.group.ranks :]
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
        self._muted = True
        try:
            run(example)
        finally:
            self._muted = False

    def _summed(self, values: Sequence[float]) -> list[float]:
        stamp = float(self._stamp)
        self._stamp = 0
        stamps = [stamp, stamp * stamp]
        *sums, total, squares = self.group.sum_floats([*values, *stamps])
        if [total, squares] != [self.group.sum_of_same(one) for one in stamps]:
            raise TaskError(
                "the ranks called other blocks of the model, or in another order, so `fsdp` has gathered or summed "
                "tensors of different blocks; call all blocks for each micro-batch, or use `ddp` or `zero1`."
            )
        return sums

    def _prepare(self) -> None:
        super()._prepare()
        count_collectives(self.module, self._count)
        # FSDP2's own hooks are not compiled either
        self._fsdp.register_forward_pre_hook(torch.compiler.disable(self._begin_pass), prepend=True)

    def _count(self, number: int) -> None:
        self._stamp = (self._stamp * 31 + number + 1) % _STAMPS

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if self._muted else super()._seen(number, gradient)

    def _begin_pass(self, *_: Any) -> None:
        forget_order(self.module)
