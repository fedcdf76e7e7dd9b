"""Full sharding whose gradients are summed in one fixed order: the same bits as `Ordered`, and as one process.

Gradients are whole while they are summed in the tree of `parallel.tree`; then each rank keeps its shard of the total.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.internals.fsdp import leave_inputs_alone
from evenstep.parallel.layout import ParameterLayout
from evenstep.parallel.reducer.padded import PaddedReducer
from evenstep.parallel.reducer.per_plan import PlanReducer
from evenstep.parallel.reducer.reducer import Reducer
from evenstep.parallel.reducer.sharded import Sharded
from evenstep.parallel.tree import TreeSum
from evenstep.tensors import gradient_format


@final
class OrderedFsdp(Sharded):
    """Shards of gradients that were summed in the order of their micro-batches' numbers; see `Sharded`."""

    exact = True

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        kind = OrderedFsdpPlanReducer if per_plan else OrderedFsdpReducer
        return kind(module, self)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.group.device.type == "cpu" and any(options.get("fused") for options in optimizer.param_groups):
            raise ArgumentError(
                "on the CPU, torch's fused optimizers round the ends of a tensor differently from its middle, so a "
                "step of shards does not have the bits of a step of the whole; build the optimizer with "
                "`foreach=True` instead of `fused=True`, or reduce as `fast`."
            )
        super().check_optimizer(optimizer)


@final
class OrderedFsdpReducer(PaddedReducer):
    """Sums each micro-batch's whole gradients in a tree."""

    collects = True

    def begin(self) -> None:
        super().begin()
        self._new_tree()

    def collect(self, microbatch: int) -> None:
        present = [g if has else None for g, has in zip(self._gradients(), self._present, strict=True)]
        self._present = [False] * len(self._present)
        self._forget_gradients()
        self._tree.add(microbatch, present)

    def reduce(self, num_microbatches: int) -> None:
        self._summed(())
        total = self._tree.total(self.group, num_microbatches=num_microbatches)
        _keep_shards([*(shard.sharded_param for shard in self._shards), *self._numbers], total, self._strategy.layout)

    def _prepare(self) -> None:
        super()._prepare()
        for part in self._parts():
            leave_inputs_alone(part)
        _sum_uses(self._shards)
        self._fsdp.set_requires_gradient_sync(False)
        self._new_tree()

    def _new_tree(self) -> None:
        self._tree = TreeSum([*(shard.unsharded_param for shard in self._shards), *self._numbers])

    def _owe(self) -> None:
        self._dummy()  # nothing is reduced in the backward, so it may as well go first
        self._forget_gradients()


@final
class OrderedFsdpPlanReducer(PlanReducer):
    """Sums each micro-batch's whole gradients of a stage in a tree."""

    collects = True

    def begin(self) -> None:
        super().begin()
        self._new_tree()

    def collect(self, microbatch: int) -> None:
        present = self._gradients()
        dtypes = [*map(_summed_in, self._shards), *map(gradient_format, self._numbers)]
        self._forget_gradients()
        self._tree.add(microbatch, [g if g is None else g.to(d) for g, d in zip(present, dtypes, strict=True)])

    def reduce(self, num_microbatches: int) -> None:
        total = self._tree.total(self.group, num_microbatches=num_microbatches)
        _keep_shards([*(shard.sharded_param for shard in self._shards), *self._numbers], total, self._strategy.layout)

    def _reduce_dtype(self) -> torch.dtype | None:
        return None  # FSDP2 sums nothing, and leaves each micro-batch's gradient where it is

    def _prepare(self) -> None:
        super()._prepare()
        for part in self._parts():
            leave_inputs_alone(part)
        _sum_uses(self._shards)
        self._new_tree()

    def _new_tree(self) -> None:
        self._tree = TreeSum([*(_like(shard, self.group.device) for shard in self._shards), *self._numbers])


def _keep_shards(parameters: Sequence[Any], total: Sequence[Tensor | None], layout: ParameterLayout) -> None:
    for live, gradient in zip(parameters, total, strict=True):
        live.grad = None if gradient is None else layout.scatter_like(live, gradient)


def _like(shard: Any, device: torch.device) -> Tensor:
    return torch.empty((), dtype=_summed_in(shard), device=device).expand(shard.unsharded_param.shape)


def _sum_uses(shards: Sequence[Any]) -> None:
    for shard in shards:
        if shard.unsharded_param.dtype != _summed_in(shard):
            shard.unsharded_param.grad_dtype = _summed_in(shard)


def _summed_in(shard: Any) -> torch.dtype:
    return torch.float32 if shard.orig_dtype.itemsize < 4 else shard.orig_dtype
