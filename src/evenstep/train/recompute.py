"""Recomputes activations of modules in the backward, with the same bits.

torch's non-reentrant checkpoint replaces a module's `forward`, so names, state dicts and hooks stay as they are. The
second forward has the random state, autocast and running statistics of the first. State in attributes changes twice.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import TaskError
from evenstep.internals import buffers_of, compiled_in_place, pytree, times_written
from evenstep.parallel.buffers import is_norm
from evenstep.train.randomness import Randomness, RandomnessSnapshot

_CALLED = ("forward", "_compiled_call_impl")  # a compiled module is called past its `forward`


def recompute(model: nn.Module, chosen: Mapping[str, nn.Module], randomness: Randomness) -> None:
    """Recompute the forwards of some modules in the backward, and of no others.

    Args:
        model: modules that an earlier run has chosen in it are reset.
        chosen: the modules, by their names in the model; none within another.

    >>> _ = torch.manual_seed(0); block = nn.Sequential(nn.Linear(2, 2), nn.Tanh()); x = torch.ones(1, 2)
    >>> block(x).sum().backward(); kept = block[0].weight.grad.clone(); block.zero_grad()
    >>> recompute(block, {"0": block[0]}, Randomness()); block(x).sum().backward()
    >>> torch.equal(block[0].weight.grad, kept), list(block.state_dict())
    (True, ['0.weight', '0.bias'])
    """
    for module in model.modules():
        for attribute in _CALLED:
            earlier = vars(module).get(attribute)
            if isinstance(earlier, CheckpointedForward):
                earlier.remove(module)
    for name, module in chosen.items():
        attribute = _CALLED[compiled_in_place(module)]
        vars(module)[attribute] = CheckpointedForward(name, module, attribute, randomness)


class _Buffer(NamedTuple):
    registry: dict[str, Tensor | None]
    name: str
    norm: nn.Module | None

    @property
    def value(self) -> Tensor | None:
        return self.registry.get(self.name)


class _TensorIndex(NamedTuple):
    place: int


@final
class CheckpointedForward:
    """Replacement of a module's `forward`, or of its compiled call.

    Args:
        attribute: of the module, which holds this.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str, randomness: Randomness) -> None:
        self._name = name
        self._randomness = randomness
        self._attribute = attribute
        self._own = vars(module).get(attribute)
        self._forward: Callable[..., Any] = getattr(module, attribute)
        self.__wrapped__ = self._forward  # so that its signature is seen
        self._buffers = [
            _Buffer(buffers_of(part), name, part if is_norm(part) else None)
            for part in module.modules()
            for name in buffers_of(part)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # torch looks for devices among positional arguments alone; and it makes two tensors of one given twice
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = {id(one): one for one in leaves if isinstance(one, Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        rest = [_TensorIndex(places[id(one)]) if isinstance(one, Tensor) else one for one in leaves]
        given = [(args, kwargs)]
        calls = self._calls()

        def forward(*tensors: Tensor) -> Any:
            with next(calls):
                if given:
                    args, kwargs = given.pop()
                else:
                    filled = [tensors[one.place] if isinstance(one, _TensorIndex) else one for one in rest]
                    args, kwargs = pytree.tree_unflatten(filled, form)
                return self._forward(*args, **kwargs)

        return checkpoint(forward, *tensors.values(), use_reentrant=False)

    def remove(self, module: nn.Module) -> None:
        """Let the module call its own `forward` again."""
        if self._own is None:
            del vars(module)[self._attribute]
        else:
            vars(module)[self._attribute] = self._own

    def _calls(self) -> Generator[AbstractContextManager[None]]:
        """Contexts of the first call, and of each recomputation."""
        values = [one.value for one in self._buffers]
        snapshots: list[RandomnessSnapshot] = []
        yield self._first(values, snapshots)
        while True:
            yield self._again(snapshots[0], values)

    @contextmanager
    def _first(self, values: list[Tensor | None], snapshots: list[RandomnessSnapshot]) -> Generator[None]:
        versions = [0 if one is None else times_written(one) for one in values]
        with self._randomness.record() as snapshot:
            snapshots.append(snapshot)
            yield
        for buffer, value, version in zip(self._buffers, values, versions, strict=True):
            if value is not None and buffer.norm is None and times_written(value) != version:
                raise TaskError(
                    f"the forward of `{self._name}` writes into its buffer `{buffer.name}`, so `memory.checkpoint` "
                    f"can't recompute it with the same bits: leave the module out.",
                    field=self._name,
                )

    @contextmanager
    def _again(self, snapshot: RandomnessSnapshot, values: list[Tensor | None]) -> Generator[None]:
        now = [one.value for one in self._buffers]
        for buffer, value in zip(self._buffers, values, strict=True):
            if value is not None and buffer.norm is not None and buffer.norm.training:
                value = value.detach().clone()
            buffer.registry[buffer.name] = value
        try:
            with self._randomness.replay(snapshot):
                yield
        finally:
            for buffer, value in zip(self._buffers, now, strict=True):
                buffer.registry[buffer.name] = value
