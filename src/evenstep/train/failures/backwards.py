"""Finds the module in whose backward a gradient first became inf or NaN.

Each tensor that enters or leaves a module is watched on its way back, as are the parameters. The gradient that is first
not finite is that of a tensor between two computations: what had this tensor as its input has made it. Where that is no
module, it is code between modules, or the loss. It changes no gradient and copies none.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

from torch import Tensor, nn

from evenstep.internals import local_tensor

Role = Literal["input", "output", "parameter"]


@final
@dataclass(slots=True, kw_only=True)
class Backwards:
    """What is found; `first` says it once the backward is over.

    Args:
        model: whose modules are watched.
    """

    model: nn.Module
    _found: list[tuple[object, Role, str]] = field(default_factory=list)
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

    def _watch(self, item: Any, role: Role, name: str) -> None:
        for tensor in tensors_in(item):
            if tensor.requires_grad:
                node = tensor if tensor.grad_fn is None else tensor.grad_fn
                self._alive.append(node)
                key = id(node), tensor.output_nr
                tensor.register_hook(self._look(key, role, name))

    def _look(self, key: object, role: Role, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            # only who shares the first tensor is wanted of those that come later
            if (not self._found or self._found[0][0] == key) and not is_finite(gradient):
                self._found.append((key, role, name))

        return look

    def _described(self, name: str) -> str:
        kind = type(self.model.get_submodule(name)).__name__
        return f"module `{name}` ({kind})" if name else f"the model ({kind})"


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements of a tensor, of its shard here, or of its values if it is sparse, are finite."""
    values = tensor.coalesce().values() if tensor.is_sparse else local_tensor(tensor)
    return bool(values.isfinite().all())


def tensors_in(item: Any) -> list[Tensor]:
    """The floating-point tensors in tuples, lists and dicts."""
    if isinstance(item, Tensor):
        return [item] if item.is_floating_point() or item.is_complex() else []
    if isinstance(item, dict):
        item = list(cast("dict[Any, Any]", item).values())
    if isinstance(item, tuple | list):
        return [tensor for part in cast("list[Any]", item) for tensor in tensors_in(part)]
    return []


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))
