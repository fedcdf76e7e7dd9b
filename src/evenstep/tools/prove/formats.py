"""Computes updates in float64 and without chance, so that two cuts of a batch can be compared to the last bits.

Casts to shorter formats go to float64. Random numbers of torch's global generators are replaced by constants, since
they are keyed by the micro-batch.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from evenstep.events import Hook, UpdateBegin, UpdateEnd
from evenstep.internals import TorchDispatchMode


@contextmanager
def wide_defaults(*, wide: bool) -> Generator[None]:
    """Inside, numbers without a format are float64, if `wide`."""
    before = torch.get_default_dtype()
    if wide:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@final
class Laboratory(Hook):
    """Computes updates in float64, or without chance, or both."""

    priority = -1_000_000

    def __init__(self, *, wide: bool, still: bool) -> None:
        self._wide, self._still = wide, still
        self._mode: Mode | None = None

    def before_update(self, event: UpdateBegin) -> None:
        if self._wide or self._still:
            self._mode = Mode(wide=self._wide, still=self._still)
            self._mode.__enter__()

    def after_update(self, event: UpdateEnd) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


@final
class Mode(TorchDispatchMode):
    """The same inside a `with`, for one update."""

    def __init__(self, *, wide: bool, still: bool) -> None:
        super().__init__()
        self._wide, self._still = wide, still
        self._left = _MOST

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self._wide and given.get("dtype") in _NARROW:
            given["dtype"] = torch.float64
        name = str(func.overloadpacket.__name__) if self._still and given.get("generator") is None else ""
        if name in _MEANS and self._left and not any(isinstance(one, torch.Generator) for one in args):
            self._left -= 1
            out = given.pop("out", None)
            made = _MEANS[name](func, args, given)
            return made if out is None else out.resize_(made.shape).copy_(made)
        return func(*args, **given)


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_MOST = 200_000  # of an update: what draws until a number pleases it would never end
_NORMAL = 0.5  # and not its mean, which would hide whatever it is multiplied by


def _filled(mean: float, *, like: bool) -> Callable[..., Tensor]:
    def give(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        made: Any = torch.full_like if like else torch.full
        kept = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "layout", "memory_format")}
        if not like and kept.get("dtype") is None:
            kept["dtype"] = torch.get_default_dtype()
        return made(args[0], mean, **{key: value for key, value in kept.items() if value is not None})

    return give


def _in_place(means: Callable[[float, float], float], first: float, second: float) -> Callable[..., Tensor]:
    def give(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        own, *given = args
        numbers = [*given, *(value for name, value in kwargs.items() if name != "generator")]
        one, other = [*numbers, *(first, second)[len(numbers) :]][:2]
        return own.fill_(means(one, other))

    return give


def _bernoulli(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    own, chance = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if str(func.overloadpacket.__name__).endswith("_"):
        return own.copy_(chance) if isinstance(chance, Tensor) else own.fill_(chance)
    return own.clone() if len(args) == 1 else torch.full_like(own, float(chance))


def _whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    bounds = [one for one in args if isinstance(one, int)]
    shape: Any = next(one for one in args if not isinstance(one, int))
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    return torch.full(shape, (low + high) // 2, dtype=kwargs.get("dtype") or torch.int64)


def _reversed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return torch.arange(args[0] - 1, -1, -1, dtype=kwargs.get("dtype") or torch.int64)


def _normal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    given: list[Any] = [*args[:2], kwargs.get("std", 1.0)]
    made = given[0] + _NORMAL * given[1]
    if isinstance(made, Tensor):
        return made
    return torch.full(args[2], made, dtype=kwargs.get("dtype") or torch.get_default_dtype())


def _shares(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[0] / args[0].sum(-1, keepdim=True)


def _likeliest(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    count: int = args[1] if len(args) > 1 else kwargs["num_samples"]
    order = args[0].sort(dim=-1, descending=True, stable=True).indices
    return order[..., torch.arange(count) % order.shape[-1]]


def _kept(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


_MEANS: Mapping[str, Callable[..., Any]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "native_dropout": _kept,
    "rand": _filled(0.5, like=False),
    "rand_like": _filled(0.5, like=True),
    "randn": _filled(_NORMAL, like=False),
    "randn_like": _filled(_NORMAL, like=True),
    "normal": _normal,
    "randint": _whole,
    "randperm": _reversed,
    "multinomial": _likeliest,
    "_sample_dirichlet": _shares,
    "uniform_": _in_place(lambda low, high: (low + high) / 2, 0.0, 1.0),
    "normal_": _in_place(lambda mean, deviation: mean + _NORMAL * deviation, 0.0, 1.0),
    "exponential_": _in_place(lambda rate, unused: 1 / rate, 1.0, 0.0),
}
