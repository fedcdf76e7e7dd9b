"""Recomputes activations of modules in the backward, with the same bits.

torch's non-reentrant checkpoint replaces a module's `forward`, so names, state dicts and hooks stay as they are. The
second forward has the random state, autocast and running statistics of the first. State in attributes changes twice.
"""

import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import TaskError
from evenstep.internals import buffers_of, compiled_in_place, pytree, times_written
from evenstep.parallel.buffers import is_norm

_CALLED = ("forward", "_compiled_call_impl")  # a compiled module is called past its `forward`


def recompute(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Recompute the forwards of some modules in the backward, and of no others.

    Args:
        model: modules that an earlier run has chosen in it are reset.
        chosen: the modules, by their names in the model; none within another.

    >>> _ = torch.manual_seed(0); block = nn.Sequential(nn.Linear(2, 2), nn.Tanh()); x = torch.ones(1, 2)
    >>> block(x).sum().backward(); kept = block[0].weight.grad.clone(); block.zero_grad()
    >>> recompute(block, {"0": block[0]}); block(x).sum().backward()
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
        vars(module)[attribute] = CheckpointedForward(name, module, attribute)


@final
class CheckpointedForward:
    """Replacement of a module's `forward`, or of its compiled call.

    Args:
        attribute: of the module, which holds this.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str) -> None:
        self._name = name
        self._attribute = attribute
        self._own = vars(module).get(attribute)
        self._forward: Callable[..., Any] = getattr(module, attribute)
        self.__wrapped__ = self._forward  # so that its signature is seen
        self._buffers = [(buffers_of(part), name, part) for part in module.modules() for name in buffers_of(part)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # torch looks for devices among positional arguments alone; and it makes two tensors of one given twice
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = {id(one): one for one in leaves if isinstance(one, Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        where = [places.get(id(one), -1) for one in leaves]
        rest = [one if place < 0 else None for one, place in zip(leaves, where, strict=True)]
        given = [(args, kwargs)]  # until the first call, as the graph must not hold them
        values = self._values()
        generators = random.getstate(), np.random.get_state()

        def forward(*tensors: Tensor) -> Any:
            if given:
                args, kwargs = given.pop()
                with self._unwritten(values):
                    return self._forward(*args, **kwargs)
            filled = [one if place < 0 else tensors[place] for one, place in zip(rest, where, strict=True)]
            args, kwargs = pytree.tree_unflatten(filled, form)
            with self._as_before(values, *generators):
                return self._forward(*args, **kwargs)

        return checkpoint(forward, *tensors.values(), use_reentrant=False)

    def remove(self, module: nn.Module) -> None:
        """Let the module call its own `forward` again."""
        if self._own is None:
            del vars(module)[self._attribute]
        else:
            vars(module)[self._attribute] = self._own

    def _values(self) -> list[Tensor | None]:
        return [registry.get(name) for registry, name, _ in self._buffers]

    @contextmanager
    def _unwritten(self, values: list[Tensor | None]) -> Generator[None]:
        versions = [0 if one is None else times_written(one) for one in values]
        yield
        for (_, name, part), value, version in zip(self._buffers, values, versions, strict=True):
            if value is not None and times_written(value) != version and not is_norm(part):
                raise TaskError(
                    f"the forward of `{self._name}` writes into its buffer `{name}`, so `memory.checkpoint` can't "
                    f"recompute it with the same bits: leave the module out.",
                    field=self._name,
                )

    @contextmanager
    def _as_before(self, values: list[Tensor | None], python: Any, numpys: Any) -> Generator[None]:
        """Inside, buffers and generators are as in the first forward; torch restores its own generators."""
        now, generators = self._values(), (random.getstate(), np.random.get_state())
        for (registry, name, part), value in zip(self._buffers, values, strict=True):
            if value is not None and part.training and is_norm(part):
                value = value.detach().clone()
            registry[name] = value
        random.setstate(python)
        np.random.set_state(numpys)
        try:
            yield
        finally:
            random.setstate(generators[0])
            np.random.set_state(generators[1])
            for (registry, name, _), value in zip(self._buffers, now, strict=True):
                registry[name] = value
