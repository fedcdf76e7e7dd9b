"""Who writes which piece of a tensor that is cut over ranks: torch's own planner, our own files.

The planner of `torch.distributed.checkpoint` knows DTensors and spreads what is replicated over the ranks. Its storage
is not used, since that unpickles, and so executes, what it reads. Importing it takes a second, so this module is
imported only where something is sharded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from evenstep.checkpoint.damage import BadFileError
from evenstep.checkpoint.sharding import Shard
from evenstep.checkpoint.table import TensorEntry, TensorPiece, check_cover, piece_key
from evenstep.errors import CheckpointError, clause


@final
class SavePlanner(DefaultSavePlanner):
    """torch's planner over named tensors, DTensors and Shards, which also finds the block of a `Shard`."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(tensors))

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # a rank that holds nothing of a tensor has nothing to write, but a tensor without elements must not get lost
        return replace(plan, items=[item for item in plan.items if not _is_empty_part(item)])

    def lookup_object(self, index: MetadataIndex) -> Any:
        leaf = self.state_dict[index.fqn]
        return leaf.local if isinstance(leaf, Shard) else super().lookup_object(index)

    def pieces(self, rank: int, plans: Sequence[SavePlan]) -> tuple[dict[str, Tensor], dict[str, TensorEntry]]:
        """What this rank writes, and all tensors of all ranks, whose pieces have no place in a file yet.

        Every rank comes to the same entries from the same plans.

        Args:
            plans: the local ones of all ranks, by rank.

        Returns:
            Piece by its name in this rank's file, and what each tensor is.

        Raises:
            CheckpointError: pieces that do not make up their tensors.
        """
        try:
            everybody, metadata = self.create_global_plan(list(plans))
        except (ValueError, AssertionError) as error:
            raise CheckpointError(f"the ranks' pieces do not make up one state: {clause(str(error))}.") from error
        mine: dict[str, Tensor] = {}
        for item in self.finish_plan(everybody[rank]).items:
            piece = self.resolve_data(item)
            assert isinstance(piece, Tensor), "all leaves are tensors"
            mine[piece_key(item.index.fqn, cast("torch.Size", item.index.offset))] = piece
        saved = cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)
        entries = {name: _entry(one) for name, one in saved.items()}
        for name in self.state_dict:
            if name not in entries:
                raise CheckpointError(f"no rank holds any of the tensor `{name}`, so it cannot be saved.")
            try:
                check_cover(name, entries[name])
            except BadFileError as error:
                raise CheckpointError(
                    f"what the ranks hold together {clause(str(error))}; each element must be held once."
                ) from error
        return mine, entries


def _is_empty_part(item: WriteItem) -> bool:
    data = cast("TensorWriteData", item.tensor_data)
    return 0 in data.chunk.sizes and 0 not in data.size


def _entry(saved: TensorStorageMetadata) -> TensorEntry:
    pieces = tuple(
        TensorPiece(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file="", begin=0, end=0)
        for chunk in saved.chunks
    )
    return TensorEntry(dtype=saved.properties.dtype, shape=tuple(saved.size), pieces=pieces)
