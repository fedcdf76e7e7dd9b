"""What FSDP2 can't take, said before anything is cut, and what its errors in the midst of a pass mean.

It knows nothing of gradients; who asks is `reducer.sharded`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import has_gradient_hooks

_INSTEAD = "use `ddp` or `zero1`, whose ranks hold whole parameters"


def check_shardable(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ArgumentError for parameters that can't be gathered with others of their unit, or with none.

    Args:
        module: of which what the units leave over is gathered together.
        units: parts of it that are gathered at once.

    >>> line = nn.Linear(1, 1); line.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    >>> check_shardable(nn.Sequential(line), [line])
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: parameters that are gathered at once must be trained in one number format, but ...
    """
    scripted = next((name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        what = f"'{scripted}'" if scripted else "the model"
        raise ArgumentError(
            f"{what} is compiled by `torch.jit`, which takes none of the hooks that gather shards; give it "
            f"as it was before that, or {_INSTEAD}."
        )
    names = {id(one): name for name, one in module.named_parameters()}
    seen: set[int] = set()
    for unit in (*units, module):
        own = [one for one in unit.parameters() if id(one) not in seen and cuttable(one)]
        seen.update(map(id, own))
        for one in own:
            if not one.is_contiguous():
                raise ArgumentError(
                    f"parameter '{names[id(one)]}' must be contiguous to be cut into shards, but has the strides "
                    f"{one.stride()}; make it from `tensor.contiguous()`, or {_INSTEAD}."
                )
            if has_gradient_hooks(one):
                raise ArgumentError(
                    f"parameter '{names[id(one)]}' has a hook (`register_hook`), which shards would not call: what is "
                    f"gathered from them is another tensor. Take it away and change the gradient in the forward "
                    f"(`torch.autograd.Function`), or {_INSTEAD}."
                )
        trained = [one for one in own if one.requires_grad]
        for one in trained:
            name, first = names[id(one)], names[id(trained[0])]
            if one.is_complex():
                raise ArgumentError(
                    f"parameters that are cut over ranks must be real, but `{name}` is {format_name(one.dtype)}; "
                    f"here {_INSTEAD}."
                )
            if one.dtype != trained[0].dtype:
                raise ArgumentError(
                    f"parameters that are gathered at once must be trained in one number format, but `{first}` is "
                    f"{format_name(trained[0].dtype)} and `{name}` is {format_name(one.dtype)}; give them one format, "
                    f"put them into different items of an `nn.ModuleList`, which are gathered one by one, or "
                    f"{_INSTEAD}."
                )


def cuttable(parameter: Tensor) -> bool:
    """Whether ranks can each hold a part of it: not of a single number, not of none, and not of what must stay whole.

    >>> cuttable(torch.zeros(3)), cuttable(torch.zeros(())), cuttable(torch.zeros(0, 3))
    (True, False, False)
    """
    return parameter.ndim > 0 and parameter.numel() > 0 and not getattr(parameter, "stays_whole", False)


def check_steppable(whole: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for an optimizer that steps shards and the parameters `whole` in one kernel: none can."""
    ids = {id(one) for one in whole}
    for number, group in enumerate(optimizer.param_groups):
        kernel = next((name for name in ("foreach", "fused") if group.get(name)), None)
        stay = [one for one in group["params"] if id(one) in ids]
        if kernel and stay and len(stay) < len(group["params"]):
            raise ArgumentError(
                f"group {number} of the optimizer has `{kernel}=True`, and holds parameters that are cut over ranks "
                f"beside {len(stay)} that are not (single numbers, none, or those of tasks), which one kernel does not "
                f"take; leave `{kernel}` out, or give those a group of their own."
            )


def refuse_written(item: str) -> None:
    """Raise TaskError for an item of a list that writes into what it is called with, which nobody would see."""
    raise TaskError(
        f"`{item or 'the model'}` writes into a list or mapping that it is called with, of which torch's FSDP2 gives "
        f"it a copy, so that whoever called it would not see it: let it return what it tells (`return x, told`), or "
        f"{_INSTEAD}."
    )


def explained(error: Exception, parameters: Mapping[str, Tensor]) -> Exception:
    """What an error of torch's in a pass means where parameters come and go; itself if nothing is known of it.

    Args:
        parameters: the model's shards, by name.
    """
    said = str(error)
    if "torch.Tensor and DTensor" in said:
        names = {id(parameter): name for name, parameter in parameters.items()}
        return TaskError(
            f"the model uses {_what(error.__traceback__, names)} while it is in shards: with `fsdp` a parameter is "
            f"whole only in the forward of the list item that holds it. Call the item itself instead of another of its "
            f"methods or its parameters, keep what others use outside of lists, or {_INSTEAD}."
        )
    if "storage of size 0" in said:
        return TaskError(
            f"a backward needs parameters that are in shards again: with `fsdp` a gradient can't be differentiated "
            f"once more (`create_graph=True`), nor a graph be walked a second time, nor an item's output that is a "
            f"view be changed in place (`y += x`; write `y = y + x`), nor a loss use a parameter that the model gives "
            f"out as it is (give out what the loss needs of it, `parameter.exp()`), nor an item give its output in an "
            f"object that is no dataclass, or by writing into what it is called with (let it return the tensors). Here "
            f"{_INSTEAD}."
        )
    return error


def _what(traceback: TracebackType | None, names: Mapping[int, str]) -> str:
    """The parameters that the innermost call was given, or else the line that used one."""
    frames: list[FrameType] = []
    lines: list[str] = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        code = traceback.tb_frame.f_code
        if f"{os.sep}torch{os.sep}" not in code.co_filename:
            lines.append(f"in `{code.co_name}`, {Path(code.co_filename).name}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    given = _given(frames[-1].f_locals.values()) if frames else ()
    found = dict.fromkeys(names[id(one)] for one in given if id(one) in names)
    what = " and ".join(f"'{name}'" for name in found) or "a parameter"
    return f"{what} ({lines[-1]})" if lines else what


def _given(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from cast("Iterable[Any]", value)
        elif isinstance(value, nn.Module):
            yield from value.parameters(recurse=False)
        else:
            yield value
