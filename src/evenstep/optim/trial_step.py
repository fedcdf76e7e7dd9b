"""Whether optimizers of torch can step such parameters: tried on tiny ones of their kind, before training.

Some refuse sparse gradients, others dense ones, complex numbers or empty parameters, some only beside certain options;
all of them say so in their first step. Those of torchao are asked about sparse gradients alone, since they compile a
kernel for what they take. Nothing of the run is touched: neither parameters nor random numbers.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.optim.sharing import TORCH, is_of_torchao
from evenstep.optim.stepping.stepping import is_narrow


class Refusal(NamedTuple):
    """A parameter that an optimizer can't step.

    Args:
        sparse: whether its gradient is, as its layer says.
        why: what the optimizer has said.
    """

    name: str
    sparse: bool
    why: str


def refusals(optimizer: Optimizer, model: nn.Module, *, keeps: bool = False) -> list[Refusal]:
    """The parameters of `optimizer` that its step would refuse; none where its class is not known.

    Args:
        keeps: whether checkpoints are saved, so that those count as well of which its state is sparse.

    >>> model = nn.Embedding(2, 2, sparse=True)
    >>> refusals(torch.optim.Adam(model.parameters()), model)[0].why
    'Adam does not support sparse gradients, please consider SparseAdam instead'
    """
    compiles = is_of_torchao(optimizer)
    if type(optimizer) not in TORCH and not compiles:
        return []
    gradients = {id(one): (name, layouts) for name, one, layouts in _gradients(model)}
    tried: dict[tuple[object, ...], str] = {}
    found: list[Refusal] = []
    for number, group in enumerate(optimizer.param_groups):
        for one in group["params"]:
            if not one.requires_grad or id(one) not in gradients:
                continue
            name, layouts = gradients[id(one)]
            if compiles and layouts != (True,):
                continue
            kind = (number, one.dtype, one.device, *_tiny(one), layouts)
            if kind not in tried:
                faults = [_fault(optimizer, group, one, sparse=sparse, keeps=keeps) for sparse in layouts]
                tried[kind] = faults[0] if all(faults) else ""
            if tried[kind]:
                found.append(Refusal(name=name, sparse=layouts == (True,), why=tried[kind]))
    return found


def why_not_added(optimizer: Optimizer, parameters: Iterable[Tensor]) -> str:
    """What the step of `optimizer` would say to these in a further group, with dense gradients; "" where it takes them.

    >>> added = [torch.zeros(3)]
    >>> why_not_added(torch.optim.SparseAdam([torch.zeros(2)]), added)
    'SparseAdam does not support dense gradients, please consider Adam instead'
    """
    if type(optimizer) not in TORCH:
        return ""
    faults = (_fault(optimizer, optimizer.defaults, one, sparse=False) for one in parameters)
    return next(filter(None, faults), "")


def why_not_by_float32(optimizer: Optimizer) -> str:
    """What the step of `optimizer` would say to float32 gradients of its 16-bit parameters; "" where it takes them.

    >>> narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    >>> why_not_by_float32(torch.optim.Adam([narrow])).split(" for")[0]
    'expected dtype c10::BFloat16'
    """
    if type(optimizer) not in TORCH:
        return ""
    narrow = ((group, one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad)
    kinds = {(id(group), one.dtype): (group, one) for group, one in narrow if is_narrow(one)}
    faults = (_fault(optimizer, group, one, sparse=False, grad=torch.float32) for group, one in kinds.values())
    return next(filter(None, faults), "")


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor, tuple[bool, ...]]]:
    """Each parameter with whether its gradient is sparse; both where only its module's own code can know."""
    for place, module in model.named_modules():
        for name, one in module.named_parameters(recurse=False):
            layouts = (False, True)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                layouts = (module.sparse,)
            elif type(module).__module__.startswith("torch.nn."):
                layouts = (False,)
            yield f"{place}.{name}".removeprefix("."), one, layouts


def _tiny(parameter: Tensor) -> list[int]:
    return [min(size, 2) for size in parameter.shape]


def _fault(
    optimizer: Optimizer,
    group: dict[str, Any],
    like: Tensor,
    *,
    sparse: bool,
    keeps: bool = False,
    grad: torch.dtype | None = None,
) -> str:
    """What the optimizer says to a parameter like this one, with a gradient in this format; "" if it steps it."""
    if sparse and (like.ndim == 0 or like.numel() == 0):
        return "it can have no sparse gradient"
    tiny = nn.Parameter(torch.zeros(_tiny(like), dtype=like.dtype, device=like.device))
    options = {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
    try:
        trial = cast("Any", type(optimizer))([{**options, "params": [tiny]}])
        tiny.grad_dtype = grad or tiny.dtype
        tiny.grad = torch.ones_like(tiny, dtype=grad)
        if sparse:
            tiny.grad = tiny.grad.to_sparse(1).coalesce()
        trial.step()
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        said = str(error).split("\n")[0].rstrip(".")
        return said if type(error) in (RuntimeError, ValueError) else f"{type(error).__name__}: {said}"
    state = trial.state[tiny] if keeps else {}
    held = next((name for name, one in state.items() if isinstance(one, Tensor) and one.is_sparse), "")
    return f"its `{held}` would be sparse, which no checkpoint of a run with a `folder` can hold" if held else ""
