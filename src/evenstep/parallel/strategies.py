"""Strategies: descriptions of how data-parallel ranks share gradients and parameters.

A strategy is a description, from which a `Reducer` per stage and a `ParameterLayout` are made.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from evenstep.arguments import choose, require_whole
from evenstep.errors import ArgumentError
from evenstep.parallel.blocks import BLOCKS
from evenstep.parallel.group import Group
from evenstep.parallel.layout import OwnStates, ParameterLayout, States
from evenstep.parallel.reducer import BUCKET_BYTES, BucketReducer, Reducer
from evenstep.tensors import parameters_in

Reduction = Literal["ordered", "fast"]
REDUCTIONS = {name: name for name in ("ordered", "fast")}


class Strategy(ABC):
    """The description of how ranks share a model.

    Args:
        group: the data-parallel ranks; a group of one by default.
        layout: who holds what of a tensor; by default every rank holds all.
        reduction: "ordered" adds gradients in numbered blocks and a fixed tree: the same bits on any number of ranks.
            "fast" adds them as they come, and ranks as the backend does.
        blocks: in which micro-batches are added, B; R ranks hold at most log₂(B/R) further sets of gradients, none
            where B ≤ R. Bits depend on it, so it is the same in all runs that are to be equal.

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
    def rank(self) -> int:
        """This process's number among the data-parallel ranks."""
        return self.group.rank

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.group.ranks

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the bits of an update depend on, by their names in a run file."""
        blocks = {"parallel.blocks": self.blocks} if self.is_ordered else {}
        return {"parallel.reduction": "ordered" if self.is_ordered else "fast", **blocks}

    def gathering(self, dtype: torch.dtype) -> Self:
        """This strategy for a model that computes in `dtype`: how it gathers parameters, where it does.

        Raises:
            ArgumentError: it was told to gather them in another format.
        """
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
    """Training of one model per rank: one process, or ranks under a hook that averages them.

    Args:
        ranks: the ranks of the run, which need such a hook (`contrib.local_sgd`); none for a single process.
        reduction, blocks: see `Strategy`.

    >>> Single().ranks
    1
    """

    def __init__(self, ranks: Group | None = None, *, reduction: Reduction = "ordered", blocks: int = BLOCKS) -> None:
        super().__init__(reduction=reduction, blocks=blocks)
        if ranks is not None:
            self.data_group = ranks

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return BucketReducer(module, self.group, ordered=True) if self.is_ordered else Reducer(module, self.group)


@final
class Owners(OwnStates):
    """Every rank holds every parameter and gradient; the optimizer state of each parameter is one rank's."""

    divides = "parameters"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._owned: list[list[nn.Parameter]] = [[] for _ in range(group.ranks)]

    def optimizer_state(self, states: States) -> States:
        return {name: one for theirs in self.of_all(states).values() for name, one in theirs.items()}

    def deal(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` hold the parameters that this rank steps, and no others."""
        parameters = parameters_in(optimizer)
        self._owned = dealt(parameters, self.group.ranks)
        own = {id(parameter) for parameter in self._owned[self.group.rank]}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        for parameter in parameters:  # some optimizers make their state when they are built
            if id(parameter) not in own and parameter in optimizer.state:
                del optimizer.state[parameter]

    def fetch_parameters(self) -> None:
        """Get the parameters that other ranks have stepped; all ranks call it together."""
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                for alike in _by_dtype(parameters):
                    flat = torch.cat([parameter.detach().reshape(-1) for parameter in alike])
                    self.group.broadcast([flat], owner)
                    if owner != self.group.rank:
                        _spread(flat, alike)


class Replicated(Strategy):
    """Every rank holds the whole model; gradients are summed over ranks during the last backward of an update.

    Args:
        group: the ranks, such as `Processes(device)`.
        reduction, blocks: see `Strategy`.
        bucket_bytes: bytes of gradients that are sent in one message.
        wire_dtype: "fast" only: the number format in which gradients are sent and summed; by default their own. With
            bfloat16 each component of the sum of R ranks is off by at most ((1 + 2⁻⁸)ᴿ - 1)·Σᵣ|gᵣ|; all ranks use the
            same sum.
    """

    _layout_class: type[ParameterLayout] = ParameterLayout

    def __init__(
        self,
        group: Group | None = None,
        *,
        reduction: Reduction = "ordered",
        blocks: int = BLOCKS,
        bucket_bytes: int = BUCKET_BYTES,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        group = group or Group()
        super().__init__(group, self._layout_class(group), reduction=reduction, blocks=blocks)
        if self.is_ordered and wire_dtype is not None:
            raise ArgumentError('`wire_dtype` needs `reduction="fast"`, as it rounds.', field="wire_dtype")
        self._bucket_bytes = bucket_bytes
        self.wire_dtype = wire_dtype

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return BucketReducer(
            module, self.group, ordered=self.is_ordered, bucket_bytes=self._bucket_bytes, wire_dtype=self.wire_dtype
        )


@final
class Ddp(Replicated):
    """Every rank holds the whole model and optimizer state; see `Replicated`.

    >>> Ddp(Group()).ranks
    1
    """


@final
class Zero1(Replicated):
    """Every rank holds the whole model, and the optimizer state of a part of its parameters, which it steps for all.

    Parameters are dealt out whole, so optimizers step as in one process (ZeRO 1, https://arxiv.org/abs/1910.02054).
    The arguments are those of `Replicated`.

    >>> Zero1(Group()).ranks
    1
    """

    _layout_class = Owners


def dealt(parameters: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Each rank's parameters: the largest first, always to the rank that has least.

    >>> [[p.numel() for p in own] for own in dealt([nn.Parameter(torch.zeros(n)) for n in (4, 1, 2, 5)], 2)]
    [[5, 1], [4, 2]]
    """
    owned: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        owner = load.index(min(load))
        owned[owner].append(parameter)
        load[owner] += parameter.numel()
    return owned


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    return [[parameter for parameter in parameters if parameter.dtype == dtype] for dtype in dtypes]


def _spread(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values in zip(parameters, flat.split(sizes), strict=True):
        parameter.copy_(values.view_as(parameter))
