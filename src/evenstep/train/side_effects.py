"""Undoes the side effects of what is tried on a model: buffers, attributes and generators are then as they were.

What a forward may change in passing (counters, caches, queues, running statistics, generators of one's own, a teacher
that it moves) is put back, of the model and of whatever else is named. Trained parameters are not: a forward in
evaluation mode does not change them.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import lru_cache
from inspect import isroutine
from types import ModuleType
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep import training_mode
from evenstep.data.seeding import generator_state, is_generator, set_generator_state, undisturbed
from evenstep.internals import local_tensor, times_written
from evenstep.pipeline.compiled import as_written
from evenstep.strides import is_dense

CONTAINERS = (dict, list, set, OrderedDict, defaultdict, Counter, deque)
"""Of Python, whose content may change in place."""


@contextmanager
def without_side_effects(owners: Iterable[object]) -> Generator[None]:
    """What changes inside the `with` in `owners`, and in modules among their attributes, is undone after it.

    Functions that torch has compiled run as they were written: to try them compiles nothing.

    >>> norm = nn.BatchNorm1d(1)
    >>> with without_side_effects([norm]): _ = norm(torch.tensor([[1.0], [3.0]])); norm.seen = 2
    >>> norm.running_mean, hasattr(norm, "seen")
    (tensor([0.]), False)
    """
    everybody = with_modules(owners)
    kept = [Attributes(one) for one in everybody if hasattr(one, "__dict__")]
    buffers = {id(one): one for owner in everybody if isinstance(owner, nn.Module) for one in owner.buffers(False)}
    buffers |= {id(one): one for owner in everybody for _, one in tensors_of(owner)}
    buffers |= {id(one): one for one in _may_follow(everybody)}
    values = [(buffer, times_written(buffer), buffer.detach().clone()) for buffer in buffers.values()]
    try:
        with ExitStack() as around:
            around.enter_context(undisturbed())
            around.enter_context(as_written())
            yield
    finally:
        for one in kept:
            one.put_back()
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)
                if times_written(buffer) != version or not _equal(buffer, value):
                    buffer.detach().copy_(value)


@contextmanager
def evaluating(model: nn.Module, device: torch.device, owners: Iterable[object] = ()) -> Generator[None]:
    """Inside, `model` is in evaluation mode, without gradients; its modes and the generators come back as they were.

    Args:
        owners: tasks, whose own networks are in evaluation mode as well.
    """
    theirs = [one for one in with_modules(owners) if isinstance(one, nn.Module)]
    modes = {module: module.training for module in (*model.modules(), *theirs)}
    for one in (*theirs, model):
        one.eval()
    try:
        with torch.no_grad(), undisturbed(device):
            yield
    finally:
        training_mode.put_back(modes)


def _equal(buffer: Tensor, value: Tensor) -> bool:
    if not is_dense(buffer):
        return True
    if buffer.dtype in (torch.complex32, torch.float4_e2m1fn_x2):
        buffer, value = (one.reshape(-1).view(torch.uint8) for one in (buffer, value))
    return torch.equal(buffer, value)


def with_modules(owners: Iterable[object]) -> list[object]:
    """The owners, and modules among their attributes, also in lists and mappings there, with all their parts."""
    found: dict[int, object] = {}
    for owner in owners:
        values = [*vars(owner).values()] if hasattr(owner, "__dict__") else []
        inner = [one for value in values if isinstance(value, list | tuple | dict) for one in _items(value)]
        for one in (owner, *(other for other in (*values, *inner) if isinstance(other, nn.Module))):
            for part in one.modules() if isinstance(one, nn.Module) else (one,):
                found[id(part)] = part
    return list(found.values())


def tensors_of(owner: object) -> Iterator[tuple[str, Tensor]]:
    """What may be written to in place and is no buffer: tensors among the attributes, also in lists and mappings."""
    for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
        inside = name not in ("_parameters", "_buffers") and isinstance(value, list | tuple | dict)
        for number, one in enumerate(_items(value)) if inside else [(-1, value)]:
            if not isinstance(one, Tensor) or one.requires_grad or one.is_meta or one.is_inference():
                continue
            if is_dense(one) and one.nbytes <= _LARGEST:
                yield f"{name}[{number}]" if inside else name, one


_LARGEST = 2**28  # bytes of a tensor that is copied; larger ones are rather data than state


def _may_follow(owners: Iterable[object]) -> list[Tensor]:
    """The frozen parameters that a forward may move after trained ones, such as a momentum encoder.

    All, where they are small; else those of whose shape no more are frozen than are trained: their copies need no more
    memory than gradients do. Large models of which little is trained (LoRA) are not copied.
    """
    modules = [one for one in owners if isinstance(one, nn.Module)]
    parameters = {id(one): one for part in modules for one in part.parameters(False)}.values()
    trained = Counter(one.shape for one in parameters if one.requires_grad)
    frozen = [one for one in parameters if not (one.requires_grad or one.is_meta or one.is_inference())]
    numbers, small = Counter(one.shape for one in frozen), sum(one.nbytes for one in frozen) <= _LARGEST
    kept = [local_tensor(one) for one in frozen if small or numbers[one.shape] <= trained[one.shape]]
    return [one for one in kept if type(one) in (Tensor, nn.Parameter)]  # others may have no copy


class Attributes:
    """The attributes of an object as they are now, and the state of the generators among them.

    >>> norm = nn.BatchNorm1d(1); kept = Attributes(norm); norm.eps = 1.0; kept.put_back(); norm.eps
    1e-05
    """

    def __init__(self, owner: object) -> None:
        self.owner, self._attributes = owner, _attributes_of(owner)
        self._before = dict(self._attributes)
        values = self._before.values()
        self._contents = [(one, copy(one)) for one in values if type(one) in CONTAINERS]
        self._generators = [(one, generator_state(one)) for one in values if is_generator(type(one))]

    def held(self) -> Iterator[object]:
        """What the attributes are, and what stands in lists and mappings among them."""
        for value in self._before.values():
            yield from _items(value) if type(value) in CONTAINERS else (value,)

    def put_back(self) -> None:
        """Let them be so again."""
        for name in [name for name in self._attributes if name not in self._before]:
            del self._attributes[name]
        for name, value in self._before.items():
            if self._attributes.get(name, _NOTHING) is not value:
                self._attributes[name] = value
        for container, content in self._contents:
            _refill(container, content)
        for generator, state in self._generators:
            set_generator_state(generator, state)


_NOTHING = object()


def attributes_within(objects: Iterable[object]) -> list[Attributes]:
    """The attributes of all that is not torch's, a function or a class, and of what such objects hold."""
    found: dict[int, Attributes] = {}
    rest = list(objects)
    while rest:
        one = rest.pop()
        if (
            id(one) not in found
            and (hasattr(one, "__dict__") or _slots_of(type(one)))
            and not isinstance(one, _NO_OBJECTS)
            and not isroutine(one)
        ):
            found[id(one)] = kept = Attributes(one)
            rest.extend(inner for inner in kept.held() if type(inner) not in _PLAIN)
    return list(found.values())


@lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that a class has places for, `__slots__`, as they are called from outside.

    >>> _slots_of(type("Place", (), {"__slots__": ("x", "__own", "__weakref__")}))
    ('x', '_Place__own')
    """
    names: list[str] = []
    for one in kind.__mro__:
        given = one.__dict__.get("__slots__", ())
        for name in (given,) if isinstance(given, str) else given:
            is_own = name.startswith("__") and not name.endswith("__")
            names.append(f"_{one.__name__.lstrip('_')}{name}" if is_own else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _attributes_of(owner: object) -> MutableMapping[str, Any]:
    """The attributes of an object as a mapping that writes through to it."""
    return _SlotsAndAttributes(owner) if _slots_of(type(owner)) else vars(owner)


@final
class _SlotsAndAttributes(MutableMapping[str, Any]):
    """Those of an object with `__slots__`, which may have others beside; a frozen one too."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        yield from [name for name in _slots_of(type(self._owner)) if hasattr(self._owner, name)]
        yield from list(getattr(self._owner, "__dict__", ()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NO_OBJECTS = (Tensor, nn.Module, type, ModuleType)


@contextmanager
def as_they_were(kept: Sequence[Attributes]) -> Generator[None]:
    """Inside, attributes are what they were when they were kept; afterwards they are as before."""
    now = [Attributes(one.owner) for one in kept]
    for one in kept:
        one.put_back()
    try:
        yield
    finally:
        for one in now:
            one.put_back()


def _refill(container: Any, content: Any) -> None:
    """Give a container the content it had, if it has another."""
    now, before = _items(container), _items(content)
    if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
        return
    container.clear()
    if isinstance(container, dict | set):
        cast("Any", container).update(content)
    else:
        container.extend(content)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for pair in cast("dict[Any, Any]", container).items() for part in pair]
    return list(container)
