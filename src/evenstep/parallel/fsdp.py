"""Full sharding by torch's FSDP2: each rank holds a part of parameters, gradients and optimizer state.

Gradients of all micro-batches but the last are summed on each rank, unsharded; during the last backward each unit's
sum is reduced and scattered while the next unit's backward runs. It is equal to `Ddp` up to rounding.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from evenstep.parallel.sharded import Sharded
from evenstep.parallel.strategy import Spoiled


@final
class Fsdp(Sharded):
    """Shards whose gradients are reduced and scattered while the last backward runs; see `Sharded`."""

    _owed = False

    def arm(self, module: Callable[..., Any]) -> None:
        self._spoken.arm(armed=True)
        self._complete_sums()
        self._module.set_requires_gradient_sync(True)
        self._module.set_is_last_backward(True)

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        if self._owed:
            self._owed = False
            self._lost = self._follow() or self._lost
        self._spoken.finish()
        self._accumulate_only()
        self._finish(self._present_anywhere(spoiled=self._lost))

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        self._owed = False
        self._follow_to_the_end(partial(self.arm, module))
        self._accumulate_only()
        with suppress(Spoiled):
            self._present_anywhere(spoiled=True)

    def squared_norm(self, gradients: list[Tensor], norms: Callable[[list[Tensor]], Tensor]) -> Tensor:
        numbers = {id(number.grad) for number in self._numbers}
        each = norms(gradients)
        if numbers and self.rank:  # which every rank has whole
            each = torch.stack([n * (id(g) not in numbers) for n, g in zip(each, gradients, strict=True)])
        # Other copies hold the same shards.
        squared = each.dot(each) if self.rank < self._shard_ranks else each.new_zeros(())
        self.group.sum(squared)()
        return squared

    def abandon(self) -> None:
        super().abandon()
        self._owed = False
        self._accumulate_only()

    def _prepare(self) -> None:
        super()._prepare()
        self._accumulate_only()

    def _owe(self) -> None:
        self._owed = True

    def _accumulate_only(self) -> None:
        self._spoken.arm(armed=False)
        self._module.set_requires_gradient_sync(False)
        self._module.set_is_last_backward(False)
