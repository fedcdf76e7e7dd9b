"""Names where a non-finite gradient came from.

The failed update is run once more, with the same randomness and the same parameters (nothing of it was applied), and
every module's output is looked at, and every gradient on its way back: each tensor that enters or leaves a module, and
the parameters. The gradient that is first not finite is that of a tensor between two computations: what had this tensor
as its input has made it. Where that is no module, it is code between modules, or the loss. It changes no gradient and
copies none; it is slow, and runs only before a run stops.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import first_of
from evenstep.internals import local_tensor
from evenstep.names import named_parameters
from evenstep.optim.apply import norms
from evenstep.parallel import Group
from evenstep.pipeline.compiled import as_written

_Role = Literal["input", "output", "parameter"]


def diagnose(model: nn.Module, rerun: Callable[[], object], *, if_finite: str = "") -> str:
    """Run `rerun` and say which module's output, or else whose backward's gradient, first was inf or NaN.

    Args:
        rerun: runs the forwards and backwards of the failed update, leaving gradients in `.grad`.
        if_finite: what to say if all numbers are finite this time, where there is a reason for that.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> _ = model[0].weight.data.fill_(float("nan"))
    >>> diagnose(model, lambda: model(torch.ones(1, 1)).sum().backward())
    'the output of module `0` (Linear) is not finite'
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not all(_finite(tensor) for tensor in _tensors_in(output)):
                place = f"module `{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
                found.append(f"the output of {place} is not finite")

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    gradients = _GradientWatch(model=model)
    try:
        with as_written(), gradients.watched():
            rerun()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    bad = [name for name, p in named_parameters(model).items() if p.grad is not None and not _is_finite(p.grad)]
    if not bad:
        squared = sum(_norm(p.grad) ** 2 for p in model.parameters() if p.grad is not None)
        if squared > torch.finfo(torch.float32).max:
            return (
                f"all numbers are finite, but the square of the gradient's norm, {math.sqrt(squared):.3g}, "
                "is not in float32: training has diverged"
            )
        different = "running the update again gave finite numbers: the model or its task computes differently each time"
        return if_finite or different
    origin = gradients.first() or "look at the loss"
    return f"all outputs are finite, but the gradients of {first_of(bad, 3)} are not: {origin}"


def gradient_norms(model: nn.Module, group: Group) -> dict[str, float | str]:
    """‖g‖₂ of each parameter's gradient, over all ranks, which ask together; "inf" and "nan" as words, as JSON wants.

    >>> model = nn.Linear(2, 1)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> gradient_norms(model, Group())
    {'weight': 5.0}
    """
    mine: dict[tuple[str, int], float] = {}
    for name, parameter in named_parameters(model).items():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            place = grad.device_mesh.get_local_rank() if hasattr(grad, "device_mesh") else 0
            mine[name, place] = _norm(grad)
    squares: dict[str, float] = {}
    # copies of one shard are equal, so each place counts once
    for (name, _), norm in {place: norm for theirs in group.gather(mine) for place, norm in theirs.items()}.items():
        squares[name] = squares.get(name, 0.0) + norm * norm
    whole = {name: math.sqrt(square) for name, square in squares.items()}
    return {name: norm if math.isfinite(norm) else str(norm) for name, norm in whole.items()}


def _norm(grad: Tensor) -> float:
    """‖g‖₂ of this rank's part of a gradient, so wide that it does not overflow."""
    values = local_tensor(grad.coalesce().values() if grad.is_sparse else grad)
    return float(norms([values], torch.float64 if values.device.type != "mps" else torch.float32))


def _finite(tensor: Tensor) -> bool:
    values = local_tensor(tensor)
    # -inf is what masks are made of; what it does harm to shows up behind it.
    return not bool((values.isnan() | (values == torch.inf)).any())


@final
@dataclass(slots=True, kw_only=True)
class _GradientWatch:
    """Finds the module in whose backward a gradient first became inf or NaN; `first` says it once that is over."""

    model: nn.Module
    _found: list[tuple[object, _Role, str]] = field(default_factory=list)
    _alive: list[object] = field(default_factory=list)  # nodes of the graph, so that no other gets their number

    def first(self) -> str:
        """Where the first gradient that was not finite came from, as half a sentence, or "" if there was none."""
        if not self._found:
            return ""
        key, role, name = self._found[0]
        if role == "parameter":
            owner, _, parameter = name.rpartition(".")
            return f"the backward of {self._described(owner)} made the gradient of its parameter `{parameter}` so"
        same = [(role, name) for other, role, name in self._found if other == key]
        takers = [name for role, name in same if role == "input"]
        innermost = [one for one in takers if not any(_is_inside(other, one) for other in takers)]
        if innermost:
            return f"the backward of {' or '.join(self._described(one) for one in innermost)} made the first of them"
        givers = [name for _, name in same]
        if "" in givers:
            return "they come from the loss: look at it"
        inner = max(givers, key=len)
        return f"they come from what is computed from the output of {self._described(inner)} outside of any module"

    @contextmanager
    def watched(self) -> Generator[None]:
        """Watch forwards and backwards inside the `with`."""
        handles: list[Any] = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(name)))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(self._look(object(), "parameter", name)))
        try:
            yield
        finally:
            self._alive.clear()
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._watch((args, kwargs), "input", name)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._watch(output, "output", name)

        return leave

    def _watch(self, item: Any, role: _Role, name: str) -> None:
        for tensor in _tensors_in(item):
            if tensor.requires_grad:
                node = tensor if tensor.grad_fn is None else tensor.grad_fn
                self._alive.append(node)
                key = id(node), tensor.output_nr
                tensor.register_hook(self._look(key, role, name))

    def _look(self, key: object, role: _Role, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            # only who shares the first tensor is wanted of those that come later
            if (not self._found or self._found[0][0] == key) and not _is_finite(gradient):
                self._found.append((key, role, name))

        return look

    def _described(self, name: str) -> str:
        kind = type(self.model.get_submodule(name)).__name__
        return f"module `{name}` ({kind})" if name else f"the model ({kind})"


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements of a tensor, of its shard here, or of its values if it is sparse, are finite."""
    values = tensor.coalesce().values() if tensor.is_sparse else local_tensor(tensor)
    return bool(values.isfinite().all())


def _tensors_in(item: Any) -> list[Tensor]:
    """The floating-point tensors in tuples, lists and dicts."""
    if isinstance(item, Tensor):
        return [item] if item.is_floating_point() or item.is_complex() else []
    if isinstance(item, dict):
        item = list(cast("dict[Any, Any]", item).values())
    if isinstance(item, tuple | list):
        return [tensor for part in cast("list[Any]", item) for tensor in _tensors_in(part)]
    return []


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))
