"""Strategies: how data-parallel ranks share gradients and parameters, and the reducers of one rank's stages."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from evenstep.arguments import choose, require_whole
from evenstep.errors import ArgumentError
from evenstep.parallel.blocks import BLOCKS, Dealing
from evenstep.parallel.buffers import Before, SharedBuffers
from evenstep.parallel.fsdp import ShardReducer
from evenstep.parallel.group import Group
from evenstep.parallel.layout import Owners, ParameterLayout, Shards, mapped
from evenstep.parallel.reducer import Reducer
from evenstep.tensors import parameters_in

Reduction = Literal["ordered", "fast"]


class Strategy:
    """The description of how ranks share a model, from which a `Reducer` per stage is made.

    Args:
        group: the data-parallel ranks; a group of one by default.
        reduction: "ordered" adds gradients in numbered blocks and a fixed tree: the same bits on any number of ranks.
            "fast" adds them as they come, and ranks as the backend does.
        blocks: in which micro-batches are added, B. R ranks hold at most log₂(B/R) further sets of gradients. Bits
            depend on it.
    """

    layout_class: type[ParameterLayout] = ParameterLayout
    gather_dtype: torch.dtype | None = None  # of parameters in shards; None: their own

    def __init__(self, group: Group | None = None, *, reduction: Reduction = "ordered", blocks: int = BLOCKS) -> None:
        require_whole("blocks", blocks, at_least=1)
        self.is_ordered = choose("reduction", reduction, {"ordered": True, "fast": False})
        self.blocks = blocks if self.is_ordered else None
        self.settings: dict[str, Any] = {"parallel.reduction": reduction}  # that bits depend on, as in a run file
        if self.is_ordered:
            self.settings["parallel.blocks"] = blocks
        self.group = group or Group()
        self.data_group = self.group  # that the data are dealt to and that save together; another for `Single`
        self.layout = self.layout_class(self.group)

    def gathering(self, dtype: torch.dtype) -> Self:
        """This strategy for a model that computes in `dtype`, in which parameters are gathered."""
        other = copy(self)
        other.gather_dtype = dtype
        return other

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        """Reducer of a stage's gradients; `per_plan`: parameters are gathered once per plan, not by each pass."""
        return Reducer(module, self.group, ordered=self.is_ordered)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ArgumentError for an optimizer that can't step what this rank holds; it is as the user has built it."""


@final
class Single(Strategy):
    """Training of one model per rank: one process, or `ranks` under a hook that averages them."""

    def __init__(self, ranks: Group | None = None, *, reduction: Reduction = "ordered", blocks: int = BLOCKS) -> None:
        super().__init__(reduction=reduction, blocks=blocks)
        self.data_group = ranks or self.group


class Ddp(Strategy):
    """Every rank holds the whole model; gradients are summed over ranks during the last backward of an update."""


@final
class Zero1(Ddp):
    """Every rank holds the whole model, and the optimizer state of a part of its parameters, which it steps for all.

    Parameters are dealt out whole, so optimizers step as in one process (ZeRO 1, https://arxiv.org/abs/1910.02054).
    """

    layout_class = Owners


@final
class Fsdp(Strategy):
    """Shards of a module that FSDP2 gathers where they are used, in the format in which the model computes.

    Args:
        shard_ranks: how many neighbouring ranks share one copy of the parameters (hybrid sharding); all by default.
    """

    layout: Shards

    def __init__(
        self,
        group: Group,
        *,
        shard_ranks: int | None = None,
        reduction: Reduction = "ordered",
        blocks: int = BLOCKS,
    ) -> None:
        if torch.__version__ < "2.13":  # as versions, not as text; since then FSDP2 can forget passes that failed
            raise ArgumentError(
                f"`fsdp` needs torch 2.13 or newer, but this is {torch.__version__}; take `zero1` or `ddp`.",
                field="fsdp",
            )
        if shard_ranks is not None and (shard_ranks < 1 or group.ranks % shard_ranks):
            raise ArgumentError(
                f"`shard_ranks` must divide the {group.ranks} data-parallel ranks, but is {shard_ranks}; leave it out "
                f"to shard over all.",
                field="shard_ranks",
            )
        super().__init__(group, reduction=reduction, blocks=blocks)
        self.layout = Shards(group, num_shards=shard_ranks or group.ranks, exact=self.is_ordered)

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return ShardReducer(
            module, self.layout, ordered=self.is_ordered, per_plan=per_plan, gather_dtype=self.gather_dtype
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        on_cpu = self.is_ordered and self.group.device.type == "cpu"
        if on_cpu and any(options.get("fused") for options in optimizer.param_groups):
            raise ArgumentError(
                "on the CPU, torch's fused optimizers round the ends of a tensor differently from its middle, so steps "
                'of shards have other bits; build the optimizer with `foreach=True`, or reduce as "fast".',
                field="fused",
            )


def strategy_named(
    name: str,
    group: Group,
    *,
    reduction: Reduction = "ordered",
    blocks: int = BLOCKS,
    shard_ranks: int | None = None,
) -> Strategy:
    """Strategy by name; "auto" is ddp. One rank shares nothing, whatever the strategy."""
    kinds = {"auto": Ddp, "single": Single, "ddp": Ddp, "fsdp": Fsdp, "zero1": Zero1}
    kind = Single if choose("strategy", name, kinds) is Single or group.ranks == 1 else kinds[name]
    more = {"shard_ranks": shard_ranks} if kind is Fsdp else {}
    return kind(group, reduction=reduction, blocks=blocks, **more)


@final
class Reducers:
    """The reducers of one rank's stages, whose reductions the runner keeps in one order on all ranks.

    Attributes:
        per_pass: the reducers whose parameters each pass gathers: then all ranks must run micro-batches of one kind at
            the same time.
        gather_per_plan: whether plans begin with UNSHARD and end with RESHARD.
    """

    def __init__(self, strategy: Strategy, *, per_plan: bool = False) -> None:
        self._strategy = strategy
        self._per_plan = per_plan
        self.group, self.layout = strategy.group, strategy.layout
        self.data_group, self.blocks = strategy.data_group, strategy.blocks
        self.per_pass: list[ShardReducer] = []
        self.gather_per_plan = per_plan and isinstance(self.layout, Shards)
        self._all: list[Reducer] = []
        self._buffers: list[SharedBuffers] = []
        self._replaced: dict[int, nn.Parameter] = {}  # replacement of each parameter

    def begin(self, dealing: Dealing | None) -> None:
        for own in self._all:
            own.begin(dealing)

    def wrap(self, module: nn.Module) -> Reducer:
        """The reducer of a stage's module, which is ready to train then."""
        own = self._strategy.reducer(module, per_plan=self._per_plan)
        before = dict(module.named_parameters(remove_duplicate=False))
        own.wrap()
        after = dict(module.named_parameters(remove_duplicate=False))
        self._replaced |= {id(parameter): after[name] for name, parameter in before.items()}
        self._all.append(own)
        if self.group.ranks > 1:
            self._buffers.append(SharedBuffers(module, self.group))
        if isinstance(own, ShardReducer) and not self._per_plan:
            self.per_pass.append(own)
        return own

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """After `wrap`: let `optimizer` hold the parameters that this rank steps."""
        self._strategy.check_optimizer(optimizer)
        whole = parameters_in(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(id(parameter), parameter) for parameter in group["params"]]
        for part in getattr(optimizer, "parts", (optimizer,)):  # of a tuple of optimizers
            for parameter in whole:  # some optimizers make their state when they are built
                cut = self._replaced.get(id(parameter), parameter)
                if cut is not parameter and parameter in part.state:
                    state: dict[str, Any] = part.state.pop(parameter)
                    part.state[cut] = mapped(state, partial(self.layout.like, cut))
        self.layout.deal(optimizer)

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on sum gradients of `parameters` only; called between updates."""
        trained = {id(parameter) for parameter in parameters}
        for own in self._all:
            own.share([parameter for parameter in own.module.parameters() if id(parameter) in trained])

    def share_buffers(self, before: Before) -> None:
        """After an update's passes: make equal on all ranks the buffers that their forwards have changed."""
        for buffers in self._buffers:
            buffers.share(before)

    @property
    def has_unseen_buffers(self) -> bool:
        """True if a buffer has changed on this rank that other ranks do not share yet."""
        return any(buffers.has_unseen for buffers in self._buffers)

    def share_unseen_buffers(self, averages: Mapping[int, Tensor]) -> None:
        """Between updates: make equal on all ranks the buffers, and their averages, that have changed unshared."""
        for buffers in self._buffers:
            buffers.share_unseen(averages)

    def is_idle(self, num_microbatches: int, own: int) -> bool:
        """True if all micro-batches of an update belong to other ranks, which train their own models."""
        return self.group.ranks < self.data_group.ranks and num_microbatches > own == 0

    def after_step(self) -> None:
        """The optimizer has made its step on this rank: get the parameters that others stepped."""
        self.layout.fetch_parameters()

    def abandon(self) -> None:
        """Forget an update that has raised in the middle."""
        self.begin(None)
        for buffers in self._buffers:
            buffers.look_anew()
