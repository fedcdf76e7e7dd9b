"""A state as named tensors, whole or cut over ranks, and the values beside them. Nothing is copied or written here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, final

from torch import Tensor

from evenstep.checkpoint.manifest import FILE_NAME
from evenstep.checkpoint.state import DTYPE_NAMES, JSON, pack
from evenstep.errors import CheckpointError


@final
@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart.

    Args:
        whole: the tensors that are whole, by part and by name in the part.
        sharded: those that are cut over ranks, by `PART/NAME`.
        values: what is not a tensor, by part.
    """

    whole: dict[str, dict[str, Tensor]]
    sharded: dict[str, Any]
    values: dict[str, JSON]

    @classmethod
    def of(cls, state: Mapping[str, object], *, alone: bool) -> "FlatState":
        """Take `state` apart; where one process is alone, what is cut over it is whole.

        Raises:
            CheckpointError: a value with no exact form, or a part whose name is none of a file.
        """
        flat = cls({}, {}, {})
        for part, tree in state.items():
            if not FILE_NAME.fullmatch(part):
                raise CheckpointError(
                    f"{part!r} cannot be a top-level key of a state, as it names a file; use letters, digits, `_` and "
                    f"`-`."
                )
            cut: dict[str, Any] = {}
            flat.whole[part], flat.values[part] = pack(tree, part, cut)
            for name, leaf in cut.items():
                local = _local(leaf)
                if local.dtype not in DTYPE_NAMES:
                    raise CheckpointError(
                        f"`{part}.{name}` is cut over ranks and of dtype {local.dtype}, which no safetensors file has; "
                        f"save it in another dtype."
                    )
                if not alone:
                    flat.sharded[f"{part}/{name}"] = leaf
                elif local.shape == leaf.size():
                    flat.whole[part][name] = local
                else:
                    raise CheckpointError(
                        f"`{part}.{name}` is cut over ranks, but one process alone is to save it; save it with all."
                    )
        return flat

    def by_name(self) -> dict[str, Any]:
        """Every tensor by `PART/NAME`."""
        whole = {f"{part}/{name}": tensor for part, each in self.whole.items() for name, tensor in each.items()}
        return {**whole, **self.sharded}

    def held(self) -> list[Tensor]:
        whole = [tensor for each in self.whole.values() for tensor in each.values()]
        return [*whole, *map(_local, self.sharded.values())]


def _local(leaf: Any) -> Tensor:
    return cast("Tensor", leaf.__get_tensor_shard__(None)).detach()
