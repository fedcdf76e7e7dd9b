"""What FSDP2 can't take, said before anything is cut, and what its errors in the midst of a pass mean.

It knows nothing of gradients; who asks is `Sharded`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

from torch import Tensor, nn

from evenstep.errors import ArgumentError, TaskError

_INSTEAD = "use `ddp` or `zero1`, whose ranks hold whole parameters"


def check_shardable(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise for parameters that can't be gathered with others of their unit.

    Args:
        module: whose.
        units: of it that are gathered one by one; what is left over is gathered with the module.

    Raises:
        ArgumentError: a parameter that is not contiguous, has no elements, or has another format than its unit.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    taken: set[int] = set()
    for unit in (*units, module):
        together = [p for p in unit.parameters() if p.ndim and id(p) not in taken]
        taken.update(map(id, together))
        for parameter in together:
            if not parameter.is_contiguous():
                raise ArgumentError(
                    f"parameter '{names[id(parameter)]}' must be contiguous to be cut into shards, but has the strides "
                    f"{parameter.stride()}; make it from `tensor.contiguous()`, or {_INSTEAD}."
                )
            if not parameter.numel() and parameter.requires_grad:
                raise ArgumentError(
                    f"parameter '{names[id(parameter)]}' has no elements, of which nothing can be cut into shards; "
                    f"leave it out, freeze it, or {_INSTEAD}."
                )
        formats = {parameter.dtype: names[id(parameter)] for parameter in together if parameter.requires_grad}
        if len(formats) > 1:
            described = " and ".join(f"'{name}' in {str(dtype)[6:]}" for dtype, name in formats.items())
            raise ArgumentError(
                f"parameters that are gathered together must be of one number format, but there are {described}; "
                f"convert one of them, let them be in different items of the model's lists, or {_INSTEAD}."
            )


def explained(error: Exception, parameters: Mapping[str, Tensor]) -> Exception:
    """What an error of torch's in a pass means where parameters come and go; itself if nothing is known of it.

    Args:
        error: as raised.
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
            f"once more (`create_graph=True`), a graph be walked a second time, or an item's output that is a view be "
            f"changed in place. Do without (`x = x + 1` instead of `x += 1`), or {_INSTEAD}."
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
