"""Replicas that share the optimizer's work: each parameter's state is kept, and its step made, by one rank only.

Gradients are summed as the strategy within does it (`Ddp`, or `Ordered` for equal bits); then each rank steps the
parameters it owns and fetches the others. Whole parameters are dealt out, so every optimizer steps exactly as in one
process, also one whose update of an element looks at others (Muon, Adafactor). It does not shard gradients or
parameters; that is `Fsdp`'s. (ZeRO stage 1: Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054.)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep.parallel.buffers import Before
from evenstep.parallel.strategy import Owned, States, Strategy, mapped


@final
class Zero1(Strategy):
    """Shares the optimizer state between replicas.

    Args:
        replicas: how their gradients are summed.
    """

    divides = "parameters"

    def __init__(self, replicas: Strategy) -> None:
        super().__init__(replicas.group)
        self.cuts_alone = replicas.cuts_alone
        self._replicas = replicas
        self.collects = replicas.collects
        self._owned: list[list[nn.Parameter]] = [[] for _ in range(self.ranks)]

    @property
    def replicas(self) -> Strategy:
        """How gradients are summed."""
        return self._replicas

    def wrap(self, module: nn.Module) -> nn.Module:
        return self._replicas.wrap(module)

    @property
    def part_held(self) -> tuple[int, int]:
        return self.rank, self.ranks

    @property
    def retries_alone(self) -> bool:
        return self._replicas.retries_alone

    def begin(self, module: Callable[..., Any]) -> None:
        self._replicas.begin(module)

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        self._replicas.spoil(module, num_microbatches, error)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        self._replicas.adopt(optimizer)
        parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        self._owned = dealt(parameters, self.ranks)
        own = {id(parameter) for parameter in self._owned[self.rank]}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        for parameter in parameters:  # some optimizers make their state when they are built
            if id(parameter) not in own and parameter in optimizer.state:
                del optimizer.state[parameter]

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        self._replicas.share(parameters)

    def arm(self, module: Callable[..., Any]) -> None:
        self._replicas.arm(module)

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        self._replicas.collect(module, microbatch)

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        self._replicas.reduce(module, num_microbatches)

    def after_step(self) -> None:
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                for alike in _by_dtype(parameters):
                    flat = torch.cat([parameter.detach().reshape(-1) for parameter in alike])
                    self.group.broadcast([flat], owner)
                    if owner != self.rank:
                        _spread(flat, alike)

    def share_buffers(self, before: Before) -> None:
        self._replicas.share_buffers(before)

    def after_update(self, update: int) -> None:
        self._replicas.after_update(update)

    def abandon(self) -> None:
        self._replicas.abandon()

    def uncompressed(self) -> AbstractContextManager[str]:
        return self._replicas.uncompressed()

    def all_states(self, states: States) -> States:
        return self._everybody(states, self._fetched)

    def kept_states(self, states: States) -> States:
        return self._everybody(states, self._owned_here)

    def _everybody(self, states: States, tensor_of: "Callable[[int, Any, _Shape], Any]") -> States:
        everything: dict[str, dict[str, Any]] = {}
        for owner, theirs in enumerate(self.group.gather(mapped(dict(states), _Shape))):
            for name, shapes in theirs.items():
                mine = states.get(name) if owner == self.rank else None
                everything[name] = _filled(shapes, mine, partial(tensor_of, owner))
        return everything

    def _owned_here(self, owner: int, mine: Any, shape: "_Shape") -> Owned:
        local = mine if owner == self.rank else torch.empty(0, dtype=shape.dtype)
        return Owned(local=local, size=shape.size)

    def _fetched(self, owner: int, mine: Any, shape: "_Shape") -> Tensor:
        tensor = mine if owner == self.rank else torch.empty(shape.size, dtype=shape.dtype)
        carried = tensor.to(self.group.device).contiguous()
        self.group.broadcast([carried], owner)
        return carried.to(tensor.device)


class _Shape:
    """What another rank must know of a tensor to receive it."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype = tuple(tensor.shape), tensor.dtype


def _filled(shapes: Any, mine: Any, tensor_of: "Callable[[Any, _Shape], Any]") -> Any:
    """A state like `shapes`, with the tensor for each `_Shape`; `mine` is this rank's own, where it has one."""
    if isinstance(shapes, _Shape):
        return tensor_of(mine, shapes)
    if isinstance(shapes, dict):
        described = cast("dict[Any, Any]", shapes)
        return {k: _filled(shape, None if mine is None else mine[k], tensor_of) for k, shape in described.items()}
    if type(shapes) in (list, tuple):
        own: list[Any] = [None] * len(shapes) if mine is None else mine
        return type(shapes)(_filled(shape, one, tensor_of) for shape, one in zip(shapes, own, strict=True))
    return shapes


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
