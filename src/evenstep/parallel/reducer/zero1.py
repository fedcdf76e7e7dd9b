"""Replicas that share the optimizer's work: each parameter's state is kept, and its step made, by one rank only.

Parameters are dealt out whole, so optimizers step exactly as in one process (ZeRO 1, https://arxiv.org/abs/1910.02054).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from evenstep.arguments import said
from evenstep.errors import ArgumentError
from evenstep.parallel.group import Group
from evenstep.parallel.layout import OwnStates, ParameterLayout, States
from evenstep.parallel.reducer.reducer import Reducer
from evenstep.parallel.reducer.strategy import Strategy
from evenstep.tensors import parameters_in


@final
class Zero1(Strategy):
    """Every rank holds the whole model, and the optimizer state of a part of its parameters, which it steps for all.

    Args:
        replicas: how gradients are summed: `Ddp` or `Ordered`.
    """

    def __init__(self, replicas: Strategy) -> None:
        if type(replicas.layout) is not ParameterLayout:
            raise ArgumentError(
                f"`replicas` must be a strategy whose ranks hold all, `Ddp` or `Ordered`, but is {said(replicas)}; "
                f"write `Zero1(Ddp(Processes(device)))`."
            )
        super().__init__(replicas.group, Owners(replicas.group))
        self._replicas = replicas

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return self._replicas.reducer(module, per_plan=per_plan)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._replicas.check_optimizer(optimizer)


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
