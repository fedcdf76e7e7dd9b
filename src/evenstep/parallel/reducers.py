"""Reducers of all stages of this rank, whose reductions the runner keeps in one order on all ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn

from evenstep.parallel.blocks import Dealing
from evenstep.parallel.buffers import Before, SharedBuffers
from evenstep.parallel.fsdp import ShardReducer
from evenstep.parallel.layout import Owners, mapped
from evenstep.parallel.reducer import Reducer
from evenstep.parallel.strategies import Strategy
from evenstep.tensors import parameters_in


@final
class Reducers:
    """The reducers of one rank's stages.

    Args:
        per_plan: whether parameters are whole while a plan of stages runs; see `Strategy.reducer`.

    Attributes:
        group, data_group, layout, blocks, gather_dtype: see `Strategy`.
        per_pass: the reducers whose parameters each pass gathers: then all ranks must run micro-batches of one kind at
            the same time.
        gather_per_plan: whether plans begin with UNSHARD and end with RESHARD.
    """

    def __init__(self, strategy: Strategy, *, per_plan: bool = False) -> None:
        self._strategy = strategy
        self._per_plan = per_plan
        self.group, self.layout = strategy.group, strategy.layout
        self.data_group = strategy.data_group
        self.blocks, self.gather_dtype = strategy.blocks, strategy.gather_dtype
        self.per_pass: list[ShardReducer] = []
        self.gather_per_plan = False
        self._all: list[Reducer] = []
        self._dealing: Dealing | None = None  # of the last update
        self._buffers: list[SharedBuffers] = []
        self._replaced: dict[int, nn.Parameter] = {}  # replacement of each parameter

    @property
    def further_sets(self) -> int:
        """The most sets of gradients that this rank held beside `.grad` in the last update."""
        return 0 if self.blocks is None or self._dealing is None else self._dealing.further_sets(self.group.rank)

    def begin(self, dealing: Dealing | None) -> None:
        self._dealing = dealing or self._dealing
        for own in self._all:
            own.begin(dealing)

    def wrap(self, module: nn.Module) -> tuple[nn.Module, Reducer]:
        """Module to call instead of a stage's module, and the reducer of the stage."""
        own = self._strategy.reducer(module, per_plan=self._per_plan)
        before = dict(module.named_parameters(remove_duplicate=False))
        wrapped = own.wrap()
        after = dict(module.named_parameters(remove_duplicate=False))
        self._replaced |= {id(parameter): after[name] for name, parameter in before.items()}
        self._all.append(own)
        if self.group.ranks > 1:
            self._buffers.append(SharedBuffers(module, self.group))
        if isinstance(own, ShardReducer):
            self.gather_per_plan |= own.per_plan
            self.per_pass += [] if own.per_plan else [own]
        return wrapped, own

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """After `wrap`: let `optimizer` hold the parameters that this rank steps.

        Raises:
            ArgumentError: it can't step what this rank holds of them.
        """
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
        if isinstance(self.layout, Owners):
            self.layout.deal(optimizer)

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on these parameters' gradients are summed, and no others'; called between updates."""
        trained = {id(parameter) for parameter in parameters}
        for own in self._all:
            own.share([parameter for parameter in own.module.parameters() if id(parameter) in trained])

    def share_buffers(self, before: Before) -> None:
        """After an update's passes: make equal on all ranks the buffers that their forwards have changed."""
        for buffers in self._buffers:
            buffers.share(before)

    def is_idle(self, num_microbatches: int, own: int) -> bool:
        """True if all micro-batches of an update belong to other ranks, which train their own models."""
        return self.group.ranks < self.data_group.ranks and num_microbatches > own == 0

    def after_step(self) -> None:
        """The optimizer has made its step on this rank: get the parameters that others stepped."""
        if isinstance(self.layout, Owners):
            self.layout.fetch_parameters()

    def after_update(self, update: int) -> None:
        for own in self._all:
            own.after_update(update)

    def abandon(self) -> None:
        """Forget an update that has raised in the middle."""
        self.begin(None)
        for buffers in self._buffers:
            buffers.look_anew()
