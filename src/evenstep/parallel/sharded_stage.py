"""The stages of a pipeline in shards: FSDP2 keeps, gathers and scatters; when it does is the plan's to say.

Before a rank runs a plan it gathers its stages, layer by layer, and keeps them until their gradients are reduced. So
nothing is gathered again between micro-batches, no forward or backward waits for a replica, and replicas may run
different numbers of micro-batches, or none. In return, while an update runs, a stage's parameters and gradients are
whole on each of its ranks; parameters between updates, optimizer state and averages are always in shards.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from evenstep.parallel.internals import be_idle, begin, end_backward, leave_inputs_alone
from evenstep.parallel.ordered_fsdp import OrderedFsdp, check_exact
from evenstep.parallel.sharded import Sharded
from evenstep.parallel.strategy import Spoiled
from evenstep.parallel.tree import Tree

T = TypeVar("T")


class ShardedStage(Sharded):
    """Shards of one stage, which is whole while plans run; the arguments are those of `Sharded`."""

    in_turn = False
    gathers_per_plan = True

    _reducing = False

    def match(
        self,
        work: Sequence[T],
        run: Callable[[T], None],
        *,
        halve: Callable[[T], T | None],
        backward: bool,
        kind: str = "",
        last: bool = True,
    ) -> None:
        pass  # no pass waits for other ranks

    def begin(self, module: Callable[..., Any]) -> None:
        super().begin(module)
        self._reducing = False
        self._forget_gradients()

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        if self._reducing:
            raise error
        self._forget_gradients()
        with suppress(Spoiled):
            self._spoil()

    @abstractmethod
    def _spoil(self) -> None:
        """Take part in `reduce` with nothing, and say that the sum must not be used."""

    def gather(self, module: Callable[..., Any]) -> None:
        for part in self._parts():
            part.unshard()

    def release(self, module: Callable[..., Any]) -> None:
        self._module.reset_iter_state()

    def _units(self, module: nn.Module) -> list[nn.Module]:
        return [layer for layer in layers(module) if any(True for _ in layer.parameters())]

    def _prepare(self) -> None:
        super()._prepare()
        self._module.set_reshard_after_forward(False)
        begin(self._module)  # a replica without work reduces before it has run any forward
        self._accumulate_only()

    def _accumulate_only(self) -> None:
        self._module.set_requires_gradient_sync(False)
        self._module.set_is_last_backward(False)
        self._module.set_reshard_after_backward(False)

    def _owe(self) -> None:
        raise AssertionError("no pass is owed")


@final
class FsdpStage(ShardedStage):
    """A stage in shards whose gradients FSDP2 reduces and scatters when the plan says so; equal up to rounding."""

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        for shard in self._shards:  # as FSDP2 does after a backward, which weight gradients that wait come behind
            shard.accumulate_unsharded_grad_if_needed()
            shard.to_accumulated_grad_if_needed()

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        self._reducing = True
        gradients = [*map(_unreduced, self._shards), *(number.grad for number in self._numbers)]
        self._present = [gradient is not None for gradient in gradients]
        self._finish(self._scattered(spoiled=False))

    def _spoil(self) -> None:
        be_idle(self._module)  # a backward may have broken off
        self._scattered(spoiled=True)

    def _scattered(self, *, spoiled: bool) -> list[bool]:
        """Reduce and scatter all gradients; gives which there are anywhere."""
        self._module.set_requires_gradient_sync(True)
        self._module.set_is_last_backward(True)
        self._module.set_reshard_after_backward(True)
        self._complete_sums()
        end_backward(self._module)
        self._accumulate_only()
        return self._present_anywhere(spoiled=spoiled)

    def each_norm(self, gradients: list[Tensor], norms: Callable[[list[Tensor]], Tensor]) -> Tensor:
        each = norms([_local(gradient) for gradient in gradients]).square()
        if self.rank >= self._shard_ranks:  # another copy of the same shards
            each.zero_()
        elif self.rank:
            for place, gradient in enumerate(gradients):
                if not hasattr(gradient, "_local_tensor"):  # which every rank has whole
                    each[place] = 0.0
        self.group.sum(each)()
        return each.sqrt()


@final
class OrderedFsdpStage(ShardedStage):
    """A stage in shards whose gradients are summed in the order of their micro-batches' numbers: `Ordered`'s bits."""

    collects = True

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        check_exact(self.group, optimizer)
        super().adopt(optimizer)

    def begin(self, module: Callable[..., Any]) -> None:
        super().begin(module)
        self._new_tree()

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        present = [*map(_unreduced, self._shards), *(number.grad for number in self._numbers)]
        dtypes = [*(shard.orig_dtype for shard in self._shards), *(number.dtype for number in self._numbers)]
        self._forget_gradients()
        self._tree.add(microbatch, [g if g is None else g.to(d) for g, d in zip(present, dtypes, strict=True)])

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        self._reducing = True
        total = self._tree.total(self.group, num_microbatches=num_microbatches)
        for live, gradient in zip([*(s.sharded_param for s in self._shards), *self._numbers], total, strict=True):
            live.grad = None if gradient is None else self.part(live, gradient)

    def _spoil(self) -> None:
        self._tree.spoil(self.group)

    def each_norm(self, gradients: list[Tensor], norms: Callable[[list[Tensor]], Tensor]) -> Tensor:
        each = [norms([self.whole(gradient)]) for gradient in gradients]  # one at a time is whole
        return torch.cat(each) if each else norms([])

    def abandon(self) -> None:
        super().abandon()
        self._new_tree()

    def _reduce_dtype(self) -> torch.dtype | None:
        return None  # FSDP2 sums nothing, and leaves each micro-batch's gradient where it is

    def _prepare(self) -> None:
        super()._prepare()
        for part in self._parts():
            leave_inputs_alone(part)
        self._new_tree()

    def _new_tree(self) -> None:
        self._tree = Tree([*(_like(shard, self.group.device) for shard in self._shards), *self._numbers])


def in_stages(like: Sharded) -> ShardedStage:
    """The same shards for a stage of a pipeline."""
    kind = OrderedFsdpStage if isinstance(like, OrderedFsdp) else FsdpStage
    return kind(like.group, **like.options)


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """What a module that only holds others, by dotted names, holds.

    >>> holder = nn.Module(); holder.add_module("blocks", nn.Module())
    >>> holder.blocks.add_module("0", nn.Linear(1, 1)); holder.add_module("head", nn.ReLU())
    >>> list(layers(holder))
    [Linear(in_features=1, out_features=1, bias=True), ReLU()]
    """
    for child in module.children():
        yield from layers(child) if type(child) is nn.Module else (child,)


def _unreduced(shard: Any) -> Tensor | None:
    kept = shard.unsharded_accumulated_grad
    return shard.unsharded_param.grad if kept is None else kept


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _like(shard: Any, device: torch.device) -> Tensor:
    """A stand-in for the whole parameter in its own format, which takes no memory."""
    return torch.empty((), dtype=shard.orig_dtype, device=device).expand(shard.unsharded_param.shape)
