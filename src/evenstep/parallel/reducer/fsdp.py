"""Full sharding by torch's FSDP2: each rank holds a part of parameters, gradients and optimizer state.

Gradients are summed unsharded, then reduced and scattered during the last backward. Equal to `Ddp` up to rounding.
"""

from typing import final

from torch import nn

from evenstep.internals.fsdp import add_late_gradient, end_backward
from evenstep.parallel.reducer.padded import PaddedReducer
from evenstep.parallel.reducer.per_plan import PlanReducer
from evenstep.parallel.reducer.reducer import Reducer
from evenstep.parallel.reducer.sharded import Sharded


@final
class Fsdp(Sharded):
    """Shards whose gradients are reduced and scattered while the last backward runs; see `Sharded`."""

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        kind = FsdpPlanReducer if per_plan else FsdpReducer
        return kind(module, self)


@final
class FsdpReducer(PaddedReducer):
    """FSDP2 reduces each unit in the last backward."""

    _owed = False

    def begin(self) -> None:
        super().begin()
        self._owed = False
        self._accumulate_only()

    def arm(self) -> None:
        self._complete_sums()
        self._fsdp.set_requires_gradient_sync(True)
        self._fsdp.set_is_last_backward(True)

    def reduce(self, num_microbatches: int) -> None:
        if self._owed:
            self._owed = False
            self._dummy()
        self._accumulate_only()
        self._finish(self._present_anywhere())

    def _prepare(self) -> None:
        super()._prepare()
        self._accumulate_only()

    def _owe(self) -> None:
        self._owed = True

    def _accumulate_only(self) -> None:
        self._fsdp.set_requires_gradient_sync(False)
        self._fsdp.set_is_last_backward(False)


@final
class FsdpPlanReducer(PlanReducer):
    """FSDP2 reduces and scatters a stage's gradients when the plan says so."""

    def collect(self, microbatch: int) -> None:
        for shard in self._shards:  # weight gradients that wait come behind the backward
            add_late_gradient(shard)

    def reduce(self, num_microbatches: int) -> None:
        self._present = [gradient is not None for gradient in self._gradients()]
        # FSDP2 reduces and scatters at the end of a backward
        self._fsdp.set_requires_gradient_sync(True)
        self._fsdp.set_is_last_backward(True)
        self._fsdp.set_reshard_after_backward(True)
        self._complete_sums()
        end_backward(self.module)
        self._accumulate_only()
        self._finish(self._present_anywhere())
