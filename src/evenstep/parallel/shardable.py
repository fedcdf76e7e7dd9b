"""What FSDP2 can't take, said before anything is cut, and what its errors in the midst of a pass mean.

It knows nothing of gradients; who asks is `Sharded`.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from evenstep.errors import ArgumentError, TaskError

_INSTEAD = "use `ddp` or `zero1`, whose ranks hold whole parameters"


def check_shardable(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise for parameters that can't be gathered with others of their unit.

    Args:
        module: whose.
        units: of it that are gathered one by one; what is left over is gathered with the module.

    Raises:
        ArgumentError: a parameter that is not contiguous, or one of another number format than others of its unit.
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
        what = _found(error.__traceback__, {id(parameter): name for name, parameter in parameters.items()})
        return TaskError(
            f"the model uses {what} while it is in shards: with `fsdp` a parameter is whole only in the forward of the "
            f"list item that holds it. Call the item itself instead of another of its methods or its parameters, keep "
            f"what others use outside of lists, or {_INSTEAD}."
        )
    if "storage of size 0" in said:
        return TaskError(
            f"a backward needs parameters that are in shards again: with `fsdp` a gradient can't be differentiated "
            f"once more (`create_graph=True`), nor a graph be walked a second time. Here {_INSTEAD}."
        )
    return error


def _found(traceback: TracebackType | None, names: Mapping[int, str]) -> str:
    """Which parameters the innermost call that has any was given."""
    frames: list[Any] = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        found = [names[id(one)] for one in _flat(frame.f_locals.values()) if id(one) in names]
        if found:
            return " and ".join(f"'{name}'" for name in dict.fromkeys(found))
    return "a parameter"


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value
