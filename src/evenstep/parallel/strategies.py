"""Strategies: descriptions of how data-parallel ranks share gradients and parameters."""

from abc import ABC, abstractmethod
from copy import copy
from typing import Any, Literal, Self, final

import torch
from torch import nn

from evenstep.arguments import choose, format_name, require_whole
from evenstep.errors import ArgumentError
from evenstep.parallel.blocks import BLOCKS
from evenstep.parallel.fsdp import ShardReducer
from evenstep.parallel.group import Group
from evenstep.parallel.layout import Owners, ParameterLayout, Shards
from evenstep.parallel.reducer import BUCKET_BYTES, BucketReducer, Reducer

Reduction = Literal["ordered", "fast"]
REDUCTIONS = {name: name for name in ("ordered", "fast")}
STRATEGIES = {name: name for name in ("auto", "single", "ddp", "fsdp", "zero1")}


class Strategy(ABC):
    """The description of how ranks share a model, from which a `Reducer` per stage is made.

    Args:
        group: the data-parallel ranks; a group of one by default.
        layout: the part of each tensor that a rank holds; all of it by default.
        reduction: "ordered" adds gradients in numbered blocks and a fixed tree: the same bits on any number of ranks.
            "fast" adds them as they come, and ranks as the backend does.
        blocks: in which micro-batches are added, B; R ranks hold at most log₂(B/R) further sets of gradients, none
            where B ≤ R. Bits depend on it.

    Attributes:
        data_group: the ranks that the data are dealt to and that save together; those of `group`, but for `Single`.
        gather_dtype: the number format in which parameters are gathered and used; None for their own.
    """

    gather_dtype: torch.dtype | None = None

    def __init__(
        self,
        group: Group | None = None,
        layout: ParameterLayout | None = None,
        *,
        reduction: Reduction = "ordered",
        blocks: int = BLOCKS,
    ) -> None:
        require_whole("blocks", blocks, at_least=1)
        self.is_ordered = choose("reduction", reduction, REDUCTIONS) == "ordered"
        self.blocks = blocks if self.is_ordered else None
        self.group = group or Group()
        self.data_group = self.group
        self.layout = layout or ParameterLayout(self.group)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the bits of an update depend on, by their names in a run file."""
        blocks = {"parallel.blocks": self.blocks} if self.is_ordered else {}
        return {"parallel.reduction": "ordered" if self.is_ordered else "fast", **blocks}

    def gathering(self, dtype: torch.dtype) -> Self:
        """This strategy for a model that computes in `dtype`: how it gathers parameters, where it does."""
        return self

    @abstractmethod
    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        """Reducer of a stage's gradients.

        Args:
            module: the stage's; its device and parameters are final.
            per_plan: whether parameters are whole while a plan runs, instead of being gathered by each pass.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ArgumentError for an optimizer that can't step what this rank holds; it is as the user has built it."""


@final
class Single(Strategy):
    """Training of one model per rank: one process, or `ranks` under a hook that averages them."""

    def __init__(self, ranks: Group | None = None, *, reduction: Reduction = "ordered", blocks: int = BLOCKS) -> None:
        super().__init__(reduction=reduction, blocks=blocks)
        if ranks is not None:
            self.data_group = ranks

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return BucketReducer(module, self.group, ordered=True) if self.is_ordered else Reducer(module, self.group)


class Ddp(Strategy):
    """Every rank holds the whole model; gradients are summed over ranks during the last backward of an update.

    Args:
        bucket_bytes: bytes of gradients that are sent in one message.
        group, reduction, blocks: see `Strategy`.
    """

    _layout_class: type[ParameterLayout] = ParameterLayout

    def __init__(
        self,
        group: Group | None = None,
        *,
        reduction: Reduction = "ordered",
        blocks: int = BLOCKS,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        group = group or Group()
        super().__init__(group, self._layout_class(group), reduction=reduction, blocks=blocks)
        self._bucket_bytes = bucket_bytes

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return BucketReducer(module, self.group, ordered=self.is_ordered, bucket_bytes=self._bucket_bytes)


@final
class Zero1(Ddp):
    """Every rank holds the whole model, and the optimizer state of a part of its parameters, which it steps for all.

    Parameters are dealt out whole, so optimizers step as in one process (ZeRO 1, https://arxiv.org/abs/1910.02054).
    """

    _layout_class = Owners


@final
class Fsdp(Strategy):
    """Shards of a module that FSDP2 gathers where they are used; reductions are sums.

    Args:
        shard_ranks: how many neighbouring ranks share one copy of the parameters (hybrid sharding); all by default.
        gather_dtype: the number format in which parameters are gathered and used; their own by default. Gradients
            are summed in float32 at least.
        group, reduction, blocks: see `Strategy`.
    """

    layout: Shards

    def __init__(
        self,
        group: Group,
        *,
        shard_ranks: int | None = None,
        gather_dtype: torch.dtype | None = None,
        reduction: Reduction = "ordered",
        blocks: int = BLOCKS,
    ) -> None:
        if torch.__version__ < "2.13":  # as versions, not as text
            raise ArgumentError(
                f"`fsdp` needs torch 2.13 or newer, whose FSDP2 can forget passes that failed, but this is torch "
                f"{torch.__version__}; install a newer one, or take `zero1` or `ddp`.",
                field="fsdp",
            )
        if shard_ranks is not None:
            require_whole("shard_ranks", shard_ranks, at_least=1, advice="all ranks share by default")
            if group.ranks % shard_ranks:
                raise ArgumentError(
                    f"`shard_ranks` must divide the {group.ranks} data-parallel ranks, but is {shard_ranks}; set a "
                    f"divisor, or leave it out to shard over all.",
                    field="shard_ranks",
                )
        layout = Shards(group, num_shards=shard_ranks or group.ranks, exact=reduction == "ordered")
        super().__init__(group, layout, reduction=reduction, blocks=blocks)
        self.gather_dtype = gather_dtype

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

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return ShardReducer(
            module, self.layout, ordered=self.is_ordered, per_plan=per_plan, gather_dtype=self.gather_dtype
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        on_cpu = self.is_ordered and self.group.device.type == "cpu"
        if on_cpu and any(options.get("fused") for options in optimizer.param_groups):
            raise ArgumentError(
                "on the CPU, torch's fused optimizers round the ends of a tensor differently from its middle, so a "
                "step of shards does not have the bits of a step of the whole; build the optimizer with "
                '`foreach=True` instead of `fused=True`, or reduce as "fast".',
                field="fused",
            )


def strategy_named(
    name: str,
    group: Group,
    *,
    reduction: Reduction = "ordered",
    blocks: int = BLOCKS,
    shard_ranks: int | None = None,
    gather_dtype: torch.dtype | None = None,
) -> Strategy:
    """Strategy by one of the names `STRATEGIES`; "auto" is ddp. One rank shares nothing, whatever the strategy."""
    name = choose("strategy", name, STRATEGIES)
    if group.ranks == 1 or name == "single":
        return Single(group, reduction=reduction, blocks=blocks)
    if name == "fsdp":
        return Fsdp(group, shard_ranks=shard_ranks, gather_dtype=gather_dtype, reduction=reduction, blocks=blocks)
    return (Zero1 if name == "zero1" else Ddp)(group, reduction=reduction, blocks=blocks)


def check_single(strategy: str, ranks: int, *, has_hooks: bool) -> None:
    """Raise ArgumentError for several ranks with the strategy for one, where no hook can average their models."""
    if strategy == "single" and ranks > 1 and not has_hooks:
        raise ArgumentError(
            f'`strategy` is "single", but there are {ranks} ranks; set it to another, or start one process.',
            field="strategy",
        )
