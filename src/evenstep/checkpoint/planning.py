"""Distribution of sharded tensors over the ranks that write them, by the planner of `torch.distributed.checkpoint`.

Importing that takes a second, so this module is imported only where a state has shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, final

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from evenstep.checkpoint.shard import Shard, TensorEntry, TensorPiece
from evenstep.errors import CheckpointError, clause


@final
class SavePlanner(DefaultSavePlanner):
    """torch's planner over named tensors, DTensors and Shards."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(tensors))

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # a rank without elements of a tensor writes nothing, but a tensor without elements must be written
        return replace(plan, items=[item for item in plan.items if not _is_empty_part(item)])

    def lookup_object(self, index: MetadataIndex) -> Any:
        leaf = self.state_dict[index.fqn]
        return leaf.local if isinstance(leaf, Shard) else super().lookup_object(index)

    def pieces(
        self, plans: Sequence[SavePlan], files: Sequence[str], rank: int
    ) -> tuple[dict[str, Tensor], dict[str, TensorEntry]]:
        """Pieces that this rank writes by their names in its file, and entries of all tensors; both of all plans."""
        try:
            everybody, metadata = self.create_global_plan(list(plans))
        except (ValueError, AssertionError) as error:
            raise CheckpointError(f"the ranks' pieces do not make up one state: {clause(str(error))}.") from error
        items = self.finish_plan(everybody[rank]).items
        mine = {_name(item.index): cast("Tensor", self.resolve_data(item)) for item in items}
        written = {_name(item.index): file for file, plan in zip(files, everybody, strict=True) for item in plan.items}
        saved = cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)
        for name in self.state_dict:
            if name not in saved:
                raise CheckpointError(f"no rank holds any of the tensor `{name}`, so it cannot be saved.", field=name)
        return mine, {name: _entry(name, one, written) for name, one in saved.items()}


def _name(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _is_empty_part(item: WriteItem) -> bool:
    data = cast("TensorWriteData", item.tensor_data)
    return 0 in data.chunk.sizes and 0 not in data.size


def _entry(name: str, saved: TensorStorageMetadata, written: Mapping[str, str]) -> TensorEntry:
    names = [_name(MetadataIndex(name, chunk.offsets)) for chunk in saved.chunks]
    pieces = [
        TensorPiece(tuple(chunk.offsets), tuple(chunk.sizes), written[at], at)
        for chunk, at in zip(saved.chunks, names, strict=True)
    ]
    return TensorEntry(saved.properties.dtype, tuple(saved.size), tuple(pieces))
