"""Recomputes activations of modules in the backward, with the same bits.

torch's non-reentrant checkpoint replaces a module's `forward`, so names, state dicts and hooks stay as they are. The
second forward sees the state of the first: torch's generators and autocast (by torch), Python's and numpy's generators,
the keys of layers within, and buffers, which change once. State in attributes changes twice.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import TaskError
from evenstep.internals import buffers_of, compiled_in_place, pytree, times_written
from evenstep.parallel.buffers import is_norm
from evenstep.train.randomness import Randomness, RandomnessSnapshot


def recompute(model: nn.Module, chosen: Mapping[str, nn.Module], randomness: Randomness) -> None:
    """Compute the forwards of some modules again in the backward, and of no others.

    Args:
        model: whose other modules keep what they compute, also those that an earlier run has chosen.
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
        # a compiled module is called past its `forward`, and what stands around it must not be compiled
        attribute = _CALLED[compiled_in_place(module)]
        vars(module)[attribute] = CheckpointedForward(name, module, attribute, randomness)


_CALLED = ("forward", "_compiled_call_impl")


@final
class CheckpointedForward:
    """Replacement of a module's `forward`, or of its compiled call.

    Args:
        name: of the module, for people.
        attribute: of the module, under which this stands.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str, randomness: Randomness) -> None:
        self.name, self.randomness = name, randomness
        self._attribute, self._own = attribute, vars(module).get(attribute)
        self.forward: Callable[..., Any] = getattr(module, attribute)
        self.__wrapped__ = self.forward  # so that its signature is seen
        self.buffers = [
            _ModuleBuffer(buffers_of(part), name, part if is_norm(part) else None)
            for part in module.modules()
            for name in buffers_of(part)
        ]
        self.moving: set[int] | None = None  # buffers that its forward moves, but for running statistics; None: unknown

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # torch looks for devices, whose generators it keeps, among positional arguments alone; and of one tensor that
        # is given twice it makes two, by which attention would go another way
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = {id(one): one for one in leaves if isinstance(one, Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        rest = [_TensorIndex(places[id(one)]) if isinstance(one, Tensor) else one for one in leaves]
        recorded = _RecordedForward(self, rest, form, called_with=(args, kwargs))
        return checkpoint(recorded, *tensors.values(), use_reentrant=False)

    def remove(self, module: nn.Module) -> None:
        if self._own is None:
            del vars(module)[self._attribute]
        else:
            vars(module)[self._attribute] = self._own


class _ModuleBuffer(NamedTuple):
    registry: dict[str, Tensor | None]
    name: str
    norm: nn.Module | None


class _TensorIndex(NamedTuple):
    place: int


@final
class _RecordedForward:
    __slots__ = ("_called_with", "_copies", "_form", "_held", "_leaves", "_moment", "_of")

    def __init__(
        self, of: CheckpointedForward, leaves: Sequence[Any], form: pytree.TreeSpec, *, called_with: tuple[Any, Any]
    ) -> None:
        self._of, self._leaves, self._form, self._called_with = of, leaves, form, called_with
        self._moment: RandomnessSnapshot | None = None
        self._held: list[Tensor | None] = []
        self._copies: dict[int, Tensor] = {}  # of buffers that the forward moves, from before it

    def __call__(self, *tensors: Tensor) -> Any:
        of = self._of
        if self._moment is not None:
            leaves = [tensors[one.place] if isinstance(one, _TensorIndex) else one for one in self._leaves]
            args, kwargs = pytree.tree_unflatten(leaves, self._form)
            with of.randomness.again(self._moment), self._buffers_again():
                return of.forward(*args, **kwargs)
        (args, kwargs), self._called_with = self._called_with, ((), {})
        versions = self._keep_buffers()
        with of.randomness.noted() as moment:
            output = of.forward(*args, **kwargs)
        self._moment = moment
        self._see_buffers(versions)
        return output

    def _keep_buffers(self) -> list[int]:
        of = self._of
        self._held = [place.registry.get(place.name) for place in of.buffers]
        for number, (place, buffer) in enumerate(zip(of.buffers, self._held, strict=True)):
            if buffer is not None and place.norm is None and (of.moving is None or number in of.moving):
                self._copies[number] = buffer.detach().clone()
        return [0 if buffer is None else times_written(buffer) for buffer in self._held]

    def _see_buffers(self, versions: list[int]) -> None:
        """Find out which buffers the forward has moved.

        Raises:
            TaskError: one that earlier ones did not, so that there is no copy of it from before.
        """
        of = self._of
        moved: set[int] = set()
        for number, (place, buffer) in enumerate(zip(of.buffers, self._held, strict=True)):
            now = place.registry.get(place.name)
            if place.norm is None and (
                now is not buffer or (now is not None and times_written(now) != versions[number])
            ):
                moved.add(number)
        if of.moving is None:
            of.moving = moved
        new = sorted(number for number in moved - of.moving if self._held[number] is not None)
        if new:
            raise TaskError(
                f"the forward of `{of.name}`, which `memory.checkpoint` computes again, has changed its buffer "
                f"`{of.buffers[new[0]].name}` now, but not in its first call, so the value before is not known; leave "
                f"the module out, or change the buffer in each forward.",
                field=of.name,
            )
        for number in self._copies.keys() - of.moving:
            del self._copies[number]

    @contextmanager
    def _buffers_again(self) -> Generator[None]:
        places = self._of.buffers
        now = [place.registry.get(place.name) for place in places]
        for number, (place, buffer) in enumerate(zip(places, self._held, strict=True)):
            if number in self._copies:
                place.registry[place.name] = self._copies[number].clone()
            elif buffer is not None and place.norm is not None and place.norm.training:
                place.registry[place.name] = buffer.detach().clone()
            elif buffer is not now[number]:
                place.registry[place.name] = buffer
        try:
            yield
        finally:
            for place, buffer in zip(places, now, strict=True):
                place.registry[place.name] = buffer
