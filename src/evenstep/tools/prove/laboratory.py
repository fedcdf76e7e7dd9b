"""Computes updates in float64 and without randomness, so that two cuts of a batch can be compared.

Casts to shorter formats become casts to float64. Random numbers of torch's global generators become constants: they
are keyed by the micro-batch, so other cuts have other numbers by design.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.data import Data, GlobalBatch, ReadOptions
from evenstep.data.tree import is_container, rebuilt
from evenstep.internals import TorchDispatchMode

# pyright: reportUnknownLambdaType=false
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
# Normal numbers are half a deviation above their mean: 0 would hide whatever they are multiplied by.
_CONSTANTS: Mapping[str, Callable[..., Any]] = {
    "native_dropout": lambda x, *_: (x.clone(), torch.ones_like(x, dtype=torch.bool)),
    "bernoulli": lambda shares, *p: p[0] if p else shares,
    "bernoulli_": lambda _, p=0.5: p,
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like"), lambda *_: 0.5),
    "normal": lambda mean, std=1.0, *_: mean + 0.5 * std,
    "normal_": lambda _, mean=0.0, std=1.0: mean + 0.5 * std,
    "uniform_": lambda _, low=0.0, high=1.0: (low + high) / 2,
    "exponential_": lambda _, rate=1.0: 1 / rate,
    "_sample_dirichlet": lambda shares, *_: shares / shares.sum(-1, keepdim=True),
    "randint": lambda *args: sum(one for one in args if isinstance(one, int)) // 2,
}


@final
class Laboratory(TorchDispatchMode):
    """Inside, operators draw constants, and compute in float64 if `wide`."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self._wide = wide

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self._wide and given.get("dtype") in _NARROW:
            given["dtype"] = torch.float64
        made = func(*args, **given)
        constant_of = _CONSTANTS.get(str(func.overloadpacket.__name__))
        has_own_generator = any(isinstance(one, torch.Generator) for one in (*args, *given.values()))
        if constant_of is None or has_own_generator:
            return made
        constant = constant_of(*args)
        if isinstance(constant, tuple):
            return constant
        return made.copy_(constant) if isinstance(constant, Tensor) else made.fill_(constant)


@contextmanager
def wide_defaults(*, wide: bool) -> Generator[None]:
    """Inside, numbers without a format are float64, if `wide`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widen_data(data: Data) -> None:
    """Have data give floating-point numbers in float64."""
    read = data.batches

    def batches(options: ReadOptions) -> Iterator[GlobalBatch]:
        with closing(cast("Any", read(options))) as given:
            for batch in given:
                for one in batch.microbatches:
                    one.data = _widened(one.data)
                yield batch

    vars(data)["batches"] = batches


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return rebuilt(value, _widened) if is_container(value) else value
