"""Parameters, gradients and optimizer state in shards: what torch's FSDP2 needs to sum exactly, for any cut.

FSDP2 gathers a unit's parameters where they are used and frees them afterwards, so all ranks must run the same
passes: a rank with fewer micro-batches runs some again, whose gradients are replaced by zeros before anyone adds them.
It averages by default; here every reduction is a SUM. Parameters that are single numbers stay whole on every rank. How
gradients are reduced is the variants' (`fsdp`, `ordered_fsdp`); nothing of FSDP2 itself is rewritten.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.parallel.group import Group
from evenstep.parallel.replicas import (
    CHECKED_EVERY_UPDATES,
    average_statistics,
    check_equal,
    running_statistics,
    synchronise,
)
from evenstep.parallel.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


class Sharded(Strategy):
    """Shards of a module that FSDP2 gathers where they are used.

    Args:
        group: the ranks, of a `Processes`.
        shard_ranks: how many neighbouring ranks share one copy of the parameters (hybrid sharding); all by default.
        gather_dtype: the number format in which parameters are gathered and used; their own by default. Gradients
            are always reduced in float32 at least.
        offload: whether shards wait in the CPU's memory; needs an accelerator.

    Raises:
        ArgumentError: `shard_ranks` does not divide the ranks, or there is no accelerator to offload from.
    """

    holds_all = False
    in_turn = True

    def __init__(
        self,
        group: Group,
        *,
        shard_ranks: int | None = None,
        gather_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__(group)
        self._shard_ranks = shard_ranks or group.ranks
        if group.ranks % self._shard_ranks:
            raise ArgumentError(
                f"`shard_ranks` must divide the {group.ranks} data-parallel ranks, but is {shard_ranks}; set a "
                f"divisor, or leave it out to shard over all."
            )
        if offload and group.device.type == "cpu":
            raise ArgumentError("`offload` keeps shards in the CPU's memory, where they are already; leave it out.")
        self._gather_dtype = gather_dtype
        self._offload = offload
        self.options: dict[str, Any] = {"shard_ranks": shard_ranks, "gather_dtype": gather_dtype, "offload": offload}
        self._module: Any = None
        self._statistics: list[Tensor] = []
        self._old: dict[int, nn.Parameter] = {}  # the parameters' shards by what the optimizer was built with
        self._shards: list[Any] = []  # FSDP2's record of each parameter
        self._numbers: list[nn.Parameter] = []  # which can't be cut
        self._present: list[bool] = []  # whether a parameter has a gradient: of the shards, then of the numbers
        self._muted = False
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind

    def wrap(self, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self._numbers = [parameter for parameter in module.parameters() if parameter.ndim == 0]
        synchronise(module, self.group)
        before = dict(module.named_parameters(remove_duplicate=False))
        mesh = self.group.mesh(self._shard_ranks)
        policy = MixedPrecisionPolicy(param_dtype=self._gather_dtype, reduce_dtype=self._reduce_dtype())
        for unit in (*self._units(module), module):
            fully_shard(
                unit,
                mesh=mesh,
                # Also the outermost: an evaluation swaps the shards' values, which gathered ones would not see.
                reshard_after_forward=True,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if self._offload else OffloadPolicy(),
                ignored_params=set(self._numbers),
            )
        after = dict(module.named_parameters(remove_duplicate=False))
        self._old = {id(parameter): after[name] for name, parameter in before.items()}
        self._module = module
        self._statistics = running_statistics(module)
        self._prepare()
        return module

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise ArgumentError(
                "the optimizer has state already, of parameters that are now sharded; give the trainer a new one, and "
                "let `resume` restore its state."
            )
        for group in optimizer.param_groups:  # of which some may belong to other stages
            group["params"] = [self._old.get(id(parameter), parameter) for parameter in group["params"]]

    def match(
        self, work: Sequence[T], run: Callable[[T], None], *, backward: bool, kind: str = "", last: bool = True
    ) -> None:
        here = [0.0] * (2 * self.ranks)
        example: Any = work[0] if work else self._examples.get(kind)
        here[self.rank], here[self.ranks + self.rank] = len(work), float(example is not None)
        said = self.group.sum_floats(here)
        counts, have = said[: self.ranks], said[self.ranks :]
        if not all(have):
            giver = have.index(1.0)
            given = self.group.gather(example if self.rank == giver else None)[giver]
            example = given if example is None else example
        self._examples[kind] = example
        missing = int(max(counts)) - len(work)
        owed = backward and last and not work and missing > 0
        for _ in range(missing - owed):
            self._run_muted(partial(run, example))
            if not any(self._present):  # else zeros have been added to what other kinds have left
                self._forget_gradients()
        if owed:
            self._owe(partial(run, example))

    @abstractmethod
    def _owe(self, run: Callable[[], None]) -> None:
        """This rank has no micro-batch: `run` must take the place of its last backward, in which others reduce."""

    def facing(self, gradient: Tensor) -> Tensor:
        return getattr(gradient, "_local_tensor", gradient)

    def over_shards(self, products: Tensor) -> None:
        if self.rank >= self._shard_ranks:  # other copies hold the same shards
            products.zero_()
        self.group.sum(products)()

    def after_update(self, update: int) -> None:
        average_statistics(self._statistics, self.group)
        if update % CHECKED_EVERY_UPDATES == 0:
            check_equal(self._module, self.group, update, replica_ranks=self._shard_ranks)

    def abandon(self) -> None:
        self._module.reset_iter_state()
        self._forget_gradients()
        self._present = [False] * len(self._present)

    def whole(self, tensor: Tensor) -> Tensor:
        full = getattr(tensor.to(self.group.device), "full_tensor", None)
        return tensor if full is None else full().to(tensor.device)

    def part(self, live: Tensor, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(live, DTensor) or live.shape != whole.shape:
            return whole
        # No rank is the source: each takes its part of what it has.
        return distribute_tensor(whole.to(live.device), live.device_mesh, live.placements, src_data_rank=None)

    def _units(self, module: nn.Module) -> list[nn.Module]:
        """What is gathered at once, beside what is left over."""
        return units(module)

    def _reduce_dtype(self) -> torch.dtype | None:
        """In which FSDP2 sums gradients; None for their own."""
        return self._gather_dtype and torch.float32

    def _parts(self) -> list["FSDPModule"]:
        from torch.distributed.fsdp import FSDPModule

        return [part for part in self._module.modules() if isinstance(part, FSDPModule)]

    def _prepare(self) -> None:
        """Set what makes FSDP2 sum, and watch which gradients appear."""
        self._shards = []
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)
            part.unshard()  # makes the parameters that autograd sees
            part.reshard()
            # FSDP2 has no public way to the gradients before their reduction (torch 2.11 to 2.13).
            groups = cast("Any", part)._get_fsdp_state()._fsdp_param_groups
            self._shards += [shard for group in groups for shard in group.fsdp_params]
        watched = [*(shard.unsharded_param for shard in self._shards), *self._numbers]
        self._present = [False] * len(watched)
        for number, parameter in enumerate(watched):
            if parameter.requires_grad:
                parameter.register_hook(partial(self._seen, number))

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        if self._muted:
            return torch.zeros_like(gradient)
        self._present[number] = True
        return gradient

    def _run_muted(self, run: Callable[[], None]) -> None:
        self._muted = True
        try:
            run()
        finally:
            self._muted = False

    def _forget_gradients(self) -> None:
        for shard in self._shards:
            shard.unsharded_accumulated_grad = None
            shard.unsharded_param.grad = None
        for number in self._numbers:
            number.grad = None

    def _present_anywhere(self) -> list[bool]:
        """Which parameters have a gradient on any rank; others must stay None, or an idle head's state would move."""
        flags = self.group.sum_floats([float(present) for present in self._present])
        self._present = [False] * len(self._present)
        return [flag > 0 for flag in flags]

    def _finish(self) -> None:
        """After the shards' gradients were summed: take away those that no rank has, and sum the single numbers'."""
        present = self._present_anywhere()
        for shard, has in zip(self._shards, present, strict=False):
            if not has:
                shard.sharded_param.grad = None
        self._sum_numbers(present[len(self._shards) :])

    def _sum_numbers(self, present: Sequence[bool]) -> None:
        """Sum over all ranks the gradients of the single numbers that have one on any of them."""
        having = [number for number, has in zip(self._numbers, present, strict=True) if has]
        for number in self._numbers:
            number.grad = number.grad if any(number is one for one in having) else None
        if not having:
            return
        total = torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in having])
        self.group.sum(total)()
        for number, gradient in zip(having, total, strict=True):
            number.grad = gradient.to(number.dtype)


def units(module: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the items of each `nn.ModuleList` and `nn.Sequential` that hold parameters.

    The outermost lists only, and no item that shares a parameter with another part of the module; what is left over
    belongs to `module` itself.

    >>> block = lambda: nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2), nn.Tanh())})
    >>> len(units(nn.ModuleDict({"wte": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])})))
    2
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    lists = lists or ([module] if isinstance(module, nn.Sequential) else [])
    inner = {id(item) for outer in lists for item in outer.modules() if item is not outer}
    items = [item for part in lists if id(part) not in inner for item in part if any(True for _ in item.parameters())]
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def alone(item: nn.Module) -> bool:
        own: dict[int, int] = {}
        for _, parameter in item.named_parameters(remove_duplicate=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
        return all(uses[key] == count for key, count in own.items())

    return [item for item in items if alone(item)]
