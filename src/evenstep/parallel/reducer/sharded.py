"""Parameters, gradients and optimizer state in shards: what torch's FSDP2 needs to sum exactly, for any cut.

FSDP2 averages by default; here every reduction is a SUM. Single numbers stay whole on every rank.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name, require_whole
from evenstep.errors import ArgumentError
from evenstep.internals.fsdp import (
    begin,
    choose_formats,
    complete_sums,
    forget_gathers,
    forget_gradient,
    gradient_of,
    parts,
    records,
)
from evenstep.parallel.group import Group
from evenstep.parallel.layout import Shards
from evenstep.parallel.reducer.reducer import ChoosesTrained, Reducer
from evenstep.parallel.reducer.strategy import Strategy
from evenstep.parallel.replicas import compare_replicas, synchronise
from evenstep.parallel.shardable import check_shardable, cuttable
from evenstep.tensors import gradient_format


class Sharded(Strategy):
    """Shards of a module that FSDP2 gathers where they are used.

    Args:
        group: the ranks, of a `Processes`.
        shard_ranks: how many neighbouring ranks share one copy of the parameters (hybrid sharding); all by default.
        gather_dtype: the number format in which parameters are gathered and used; their own by default. Gradients
            are always reduced in float32 at least.
        offload: whether shards wait in the CPU's memory; needs an accelerator.
    """

    exact: bool = False

    def __init__(
        self,
        group: Group,
        *,
        shard_ranks: int | None = None,
        gather_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        if shard_ranks is not None:
            require_whole("shard_ranks", shard_ranks, at_least=1, advice="all ranks share by default")
        check_sharding(group.ranks, group.device, shard_ranks=shard_ranks, offload=offload)
        layout = Shards(group, num_shards=shard_ranks or group.ranks, exact=self.exact)
        super().__init__(group, layout)
        self.gather_dtype = gather_dtype
        self.offload = offload

    def gathering(self, dtype: torch.dtype) -> Self:
        if self.gather_dtype not in (None, dtype):
            raise ArgumentError(
                f"`gather_dtype` must be the format that the model computes in, {format_name(dtype)}, or left out, but "
                f"is {format_name(self.gather_dtype)}; leave it out.",
                field="gather_dtype",
            )
        other = copy(self)
        other.gather_dtype = dtype
        return other


def check_sharding(ranks: int, device: torch.device, *, shard_ranks: int | None, offload: bool) -> None:
    """Raise ArgumentError for what can't be with so many data-parallel ranks on such devices; see `Sharded`."""
    if torch.__version__ < "2.13":  # as versions, not as text
        raise ArgumentError(
            f"`fsdp` needs torch 2.13 or newer, whose FSDP2 can forget passes that failed and reduce what some ranks "
            f"don't use, but this is torch {torch.__version__}; install a newer one, or take `zero1` or `ddp`.",
            field="fsdp",
        )
    if shard_ranks is not None and ranks % shard_ranks:
        raise ArgumentError(
            f"`shard_ranks` must divide the {ranks} data-parallel ranks, but is {shard_ranks}; set a divisor, or leave "
            f"it out to shard over all.",
            field="shard_ranks",
        )
    if offload and device.type == "cpu":
        raise ArgumentError(
            "`offload` keeps shards in the CPU's memory, where they are already; leave it out.", field="offload"
        )


class ShardedReducer(Reducer, ChoosesTrained):
    """What all ways to reduce shards share."""

    def __init__(self, module: nn.Module, strategy: Sharded) -> None:
        super().__init__(module, strategy.group)
        self._strategy = strategy
        self._fsdp: Any = module  # an `FSDPModule` once it is wrapped
        self._shards: list[Any] = []  # FSDP2's record of each parameter
        self._numbers: list[nn.Parameter] = []  # which can't be cut
        self._present: list[bool] = []  # whether a parameter has a gradient: of the shards, then of the numbers
        self._watched: set[int] = set()  # whose gradients are seen

    def wrap(self) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        units = self._units()
        check_shardable(self.module)
        self._numbers = [parameter for parameter in self.module.parameters() if not cuttable(parameter)]
        synchronise(self.module, self.group)
        mesh = self.group.mesh(self._strategy.layout.num_shards)
        for parameter in filter(cuttable, self.module.parameters()):
            if _is_narrow(parameter):
                parameter.grad_dtype = torch.float32  # of the shards' too, since torch 2.15
        policy = MixedPrecisionPolicy(param_dtype=self._strategy.gather_dtype, reduce_dtype=self._reduce_dtype())
        for unit in (*units, self.module):
            fully_shard(
                unit,
                mesh=mesh,
                # Also the outermost: an evaluation swaps the shards' values, which gathered ones would not see.
                reshard_after_forward=True,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if self._strategy.offload else OffloadPolicy(),
                ignored_params=set(self._numbers),
            )
        self._prepare()
        return self.module

    def after_update(self, update: int) -> None:
        compare_replicas(self.module, self.group, update, replica_ranks=self._strategy.layout.num_shards)

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        for each in records(self.module):
            choose_formats(each)
        for shard in self._shards:  # as FSDP2 would when it next gathers it
            shard.unsharded_param.requires_grad_(shard.sharded_param.requires_grad)
        self._watch()

    def _units(self) -> list[nn.Module]:
        return units(self.module)

    def _reduce_dtype(self) -> torch.dtype | None:
        return self._strategy.gather_dtype and torch.float32

    def _parts(self) -> list[Any]:
        return [part for _, part in parts(self.module)]

    def _prepare(self) -> None:
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)
            part.unshard()  # makes the parameters that autograd sees
            part.reshard()
        self._shards = [shard for each in records(self.module) for shard in each.fsdp_params]
        for shard in self._shards:
            live = shard.sharded_param
            if _is_narrow(live) and live.grad_dtype == live.dtype:
                live.grad_dtype = None  # FSDP2 puts one of its own format there, which becomes float32
        begin(self.module)
        self._present = [False] * (len(self._shards) + len(self._numbers))
        self._watched = set()
        self._watch()

    def _watch(self) -> None:
        watched = [*(shard.unsharded_param for shard in self._shards), *self._numbers]
        for number, parameter in enumerate(watched):
            if parameter.requires_grad and number not in self._watched:
                parameter.register_hook(partial(self._seen, number))
                self._watched.add(number)

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        self._present[number] = True
        return gradient

    def _reset(self) -> None:
        forget_gathers(self.module)
        self._fsdp.reset_iter_state()
        self._forget_gradients()
        self._present = [False] * len(self._present)

    def _complete_sums(self) -> None:
        for each in records(self.module):
            complete_sums(each)

    def _gradients(self) -> list[Tensor | None]:
        return [*map(gradient_of, self._shards), *(number.grad for number in self._numbers)]

    def _forget_gradients(self) -> None:
        for shard in self._shards:
            forget_gradient(shard)
        for number in self._numbers:
            number.grad = None

    def _summed(self, values: Sequence[float]) -> list[float]:
        return self.group.sum_floats(values)

    def _present_anywhere(self) -> list[bool]:
        flags = self._summed([float(has) for has in self._present])
        self._present = [False] * len(self._present)
        return [flag > 0 for flag in flags]

    def _finish(self, present: Sequence[bool]) -> None:
        for shard, has in zip(self._shards, present, strict=False):
            parameter = shard.sharded_param
            if not has:
                parameter.grad = None
            elif parameter.grad_dtype is None:
                parameter.grad = parameter.grad.float()
        self._sum_numbers(present[len(self._shards) :])

    def _sum_numbers(self, present: Sequence[bool]) -> None:
        for number, has in zip(self._numbers, present, strict=True):
            if not has:
                number.grad = None
            elif not number.numel():
                number.grad = torch.zeros_like(number, dtype=gradient_format(number))
        having = [number for number, has in zip(self._numbers, present, strict=True) if has and number.numel()]
        if not having:
            return
        own = [torch.zeros_like(one, dtype=gradient_format(one)) if one.grad is None else one.grad for one in having]
        total = torch.cat([one.flatten() for one in own])
        self.group.sum(total)()
        for number, gradient in zip(having, total.split([one.numel() for one in having]), strict=True):
            number.grad = gradient.view(number.shape).to(gradient_format(number))


def _is_narrow(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.itemsize < 4


def _called(item: nn.Module) -> Iterator[nn.Module]:
    if isinstance(item, torch.jit.ScriptModule) or type(item).forward is not nn.Module.forward:
        yield item
        return
    for child in item.children():
        yield from _called(child)


def units(module: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the items of each `nn.ModuleList` and `nn.Sequential` that hold parameters.

    The outermost lists only, of an item that is a container without a forward what it holds, and no item that shares a
    parameter with another part of the module; what is left over belongs to `module` itself.

    >>> block = lambda: nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2), nn.Tanh())})
    >>> len(units(nn.ModuleDict({"wte": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])})))
    2
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    lists = lists or ([module] if isinstance(module, nn.Sequential) else [])
    inner = {id(item) for outer in lists for item in outer.modules() if item is not outer}
    outermost = [item for part in lists if id(part) not in inner for item in part]
    items = [one for item in outermost for one in _called(item) if any(map(cuttable, one.parameters()))]
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def alone(item: nn.Module) -> bool:
        own: dict[int, int] = {}
        for _, parameter in item.named_parameters(remove_duplicate=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
        return all(uses[key] == count for key, count in own.items())

    return [item for item in items if alone(item)]
