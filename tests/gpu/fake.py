"""A stand-in for an accelerator on machines without one: tensors on torch's meta device, whose values nobody can read.

Whatever makes a host wait for an accelerator (`.item()`, `float(tensor)`, `if tensor`, boolean indices, copies to the
host) can't be done with such a tensor at all, and raises. What would be a copy from the host that is waited for
(`torch.tensor(x, device=…)`, `.to(device)` without `non_blocking`, an index on the host) raises inside `no_waiting`.
It computes nothing: shapes and orders are tested with it, never values.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FAKE = torch.device("meta")
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
_COPIES = ("aten._to_copy.default", "aten.copy_.default")
_INDEXED = ("aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default", "aten.index_select.default")


class HostWaitsError(Exception):
    """The host would wait for the device."""


class FusedSgd(torch.optim.Optimizer):
    """θ ← θ - lr·g / grad_scale where found_inf is 0: what torch's fused kernels do on devices that have them."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        scale, skipped = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad if scale is None else parameter.grad / scale
                step = gradient if skipped is None else gradient * (1 - skipped)
                with torch.no_grad():
                    parameter.sub_(step * group["lr"])


def on_fake(model: nn.Module) -> nn.Module:
    """The same model on the stand-in."""
    return model.to(FAKE)


@contextmanager
def no_waiting() -> Generator[None]:
    """Inside, a HostWaitsError is raised where the host would wait for an accelerator."""
    with _OfFunctions(), _OfKernels():
        yield


class _OfFunctions(TorchFunctionMode):
    """Sees functions that make tensors of Python's numbers, which no kernel shows."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        device = named.get("device")
        if func in _FROM_VALUES and device is not None and torch.device(device) == FAKE:
            given = args[0] if args else named.get("data")
            if not (isinstance(given, Tensor) and given.device == FAKE):
                raise HostWaitsError(
                    f"torch.{func.__name__}({given!r}, device=…) copies a value and waits for the copy"
                )
        return func(*args, **named)


class _OfKernels(TorchDispatchMode):
    """Sees copies and indices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = str(func)
        if name in _COPIES:
            _check_copy(name, args, named)
        if name in _INDEXED and args[0].device == FAKE:
            for index in args[1] if isinstance(args[1], (list, tuple)) else args[2:3]:
                if isinstance(index, Tensor) and (index.device != FAKE or index.dtype == torch.bool):
                    raise HostWaitsError(f"{name} with an index of {index.dtype} on {index.device}")
        return func(*args, **named)


def _check_copy(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    of_copy = name == "aten.copy_.default"
    source = args[1] if of_copy else args[0]
    target = args[0].device if of_copy else torch.device(named.get("device") or source.device)
    waits = not (named.get("non_blocking") or (of_copy and len(args) > 2 and args[2]))
    # one number of the host is an argument of the kernel that writes it
    if source.device != target and FAKE in (source.device, target) and waits and not (of_copy and source.dim() == 0):
        raise HostWaitsError(f"{name} of {tuple(source.shape)} from {source.device} to {target}")
