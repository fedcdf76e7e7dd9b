"""The tensors of a state by name, whole or cut over ranks, and what else it holds.

It tells what there is to save, and asks the planner for a share of it. Nothing is copied or written here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

from torch import Tensor

from evenstep.checkpoint.manifest import FILE_NAME
from evenstep.checkpoint.sharding import Stored, check_cover
from evenstep.checkpoint.state import DTYPE_NAMES, JSON, pack
from evenstep.checkpoint.tensorfile import BadFileError
from evenstep.errors import CheckpointError


@final
@dataclass(slots=True)
class Leaves:
    """A state taken apart.

    Args:
        whole: the tensors that are whole, by part and by name in the part.
        sharded: those that are cut over ranks, by `PART/NAME`.
        skeletons: what is not a tensor, by part.
    """

    whole: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    sharded: dict[str, object] = field(default_factory=dict)
    skeletons: dict[str, JSON] = field(default_factory=dict)
    _planner: Any = None

    def pack(self, state: Mapping[str, object], *, alone: bool) -> None:
        """Take `state` apart; where one process is alone, what is cut over it is whole.

        Raises:
            CheckpointError: a value with no exact form, or a part whose name is none of a file.
        """
        for part, tree in state.items():
            if not FILE_NAME.fullmatch(part):
                raise CheckpointError(
                    f"{part!r} cannot be a top-level key of a state, as it names a file; use letters, digits, `_` and "
                    f"`-`."
                )
            cut: dict[str, Any] = {}
            self.whole[part], self.skeletons[part] = pack(tree, part, cut)
            for name, leaf in cut.items():
                local = cast("Tensor", leaf.__get_tensor_shard__(None)).detach()
                if local.dtype not in DTYPE_NAMES:
                    raise CheckpointError(
                        f"`{part}.{name}` is cut over ranks and of dtype {local.dtype}, which no safetensors file has; "
                        f"save it in another dtype."
                    )
                if alone:
                    if local.shape != leaf.size():
                        raise CheckpointError(
                            f"`{part}.{name}` is cut over ranks, but one process alone is to save it; save it with all."
                        )
                    self.whole[part][name] = local
                else:
                    self.sharded[f"{part}/{name}"] = leaf

    def names(self) -> list[str]:
        """`PART/NAME` of every tensor."""
        return [*self._whole(), *self.sharded]

    def by_name(self) -> dict[str, object]:
        """Every tensor by `PART/NAME`."""
        return {**self._whole(), **self.sharded}

    def held(self) -> list[Tensor]:
        """What this rank holds: whole tensors, and its blocks of the others."""
        blocks = [
            cast("Tensor", cast("Any", leaf).__get_tensor_shard__(None)).detach() for leaf in self.sharded.values()
        ]
        return [*self._whole().values(), *blocks]

    def plan(self) -> object:
        """What this rank could write, for the others to see; None if nothing is cut over ranks."""
        if not self.sharded:
            return None
        from evenstep.checkpoint.planning import local_plan

        self._planner, plan = local_plan(self.by_name())
        return plan

    def pieces(self, rank: int, plans: Sequence[Any]) -> tuple[dict[str, Tensor], dict[str, Stored]]:
        """What this rank writes, by the names in its file, and what all tensors are.

        Args:
            rank: this one.
            plans: what `plan` gave on all ranks.

        Raises:
            CheckpointError: pieces that do not make up their tensors.
        """
        from evenstep.checkpoint.planning import pieces_of

        mine, stored = pieces_of(rank, self._planner, plans)
        for name in self.names():
            if name not in stored:
                raise CheckpointError(f"no rank holds any of the tensor `{name}`, so it cannot be saved.")
            try:
                check_cover(name, stored[name])
            except BadFileError as error:
                raise CheckpointError(
                    f"what the ranks hold together {error}; each element must be held once."
                ) from error
        return mine, stored

    def _whole(self) -> dict[str, Tensor]:
        return {f"{part}/{name}": tensor for part, each in self.whole.items() for name, tensor in each.items()}
