"""Who writes which piece of a tensor that is cut over ranks, and who reads which: torch's own planner, our own files.

The planner of `torch.distributed.checkpoint` knows DTensors, spreads what is replicated over the ranks, and works out
which saved pieces overlap which live ones, whatever either's layout. Its storage is not used, since that unpickles, and
so executes, what it reads. Importing it takes a second, so this module is imported only where something is sharded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from evenstep.checkpoint.sharding import Piece, Shard, Stored, Table, piece_key
from evenstep.checkpoint.tensorfile import bytes_of
from evenstep.errors import CheckpointError

Leaves = Mapping[str, object]
"""Tensors, DTensors and Shards by name."""


@final
class SavePlanner(DefaultSavePlanner):
    """torch's planner over named leaves, which also finds the block of a `Shard`."""

    def __init__(self, leaves: Leaves) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(leaves))

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # a rank that holds nothing of a tensor has nothing to write, but a tensor without elements must not get lost
        return replace(plan, items=[item for item in plan.items if not _is_empty_part(item)])

    def lookup_object(self, index: MetadataIndex) -> Any:
        leaf = self.state_dict[index.fqn]
        return leaf.local if isinstance(leaf, Shard) else super().lookup_object(index)


def _is_empty_part(item: WriteItem) -> bool:
    data = cast("TensorWriteData", item.tensor_data)
    return 0 in data.chunk.sizes and 0 not in data.size


def local_plan(leaves: Leaves) -> tuple[SavePlanner, SavePlan]:
    """What this rank could write: its pieces, and all that is replicated."""
    planner = SavePlanner(leaves)
    return planner, planner.create_local_plan()


def pieces_of(
    rank: int, planner: SavePlanner, plans: Sequence[SavePlan]
) -> tuple[dict[str, Tensor], dict[str, Stored]]:
    """What this rank writes, and all tensors of all ranks without their pieces' places.

    Every rank comes to the same result from the same plans.

    Args:
        rank: this one.
        planner: of this rank.
        plans: the local ones of all ranks, by rank.

    Returns:
        Piece by its name in this rank's file, and what each tensor is.

    Raises:
        CheckpointError: pieces that overlap or lie outside their tensor.
    """
    try:
        everybody, metadata = planner.create_global_plan(list(plans))
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' pieces do not make up one state: {error}.") from error
    mine: dict[str, Tensor] = {}
    for item in planner.finish_plan(everybody[rank]).items:
        piece = planner.resolve_data(item)
        assert isinstance(piece, Tensor), "all leaves are tensors"
        mine[piece_key(item.index.fqn, cast("torch.Size", item.index.offset))] = piece
    entries = cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)
    return mine, {
        name: Stored(
            dtype=entry.properties.dtype,
            shape=tuple(entry.size),
            pieces=tuple(
                Piece(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file="", begin=0, end=0)
                for chunk in entry.chunks
            ),
        )
        for name, entry in entries.items()
    }


@final
class LoadInto(DefaultLoadPlanner):
    """torch's planner that fills named live leaves, in place."""

    def __init__(self, leaves: Leaves, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = dict(leaves)
        self.metadata = metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        leaf = cast("dict[str, Any]", self.state_dict)[index.fqn]
        return leaf.local if isinstance(leaf, Shard) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise AssertionError("a checkpoint of evenstep holds no pickled bytes")


@final
class FolderReader(StorageReader):
    """Reads the pieces of a checkpoint's tensors, for this package or for `torch.distributed.checkpoint.load`.

    It trusts the files: verify them before.

    Args:
        folder: of the checkpoint.
        table: what lies where in it.
    """

    def __init__(self, folder: Path, table: Table) -> None:
        self._folder = folder
        self._table = table

    def reset(self, checkpoint_id: object = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(stored) for name, stored in self._table.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        by_file: dict[str, list[tuple[Piece, ReadItem]]] = {}
        for item in plan.items:
            piece = self._piece(item.storage_index)
            by_file.setdefault(piece.file, []).append((piece, item))
        for name, wanted in by_file.items():
            with FileIO(self._folder / name, "rb") as file:
                for piece, item in sorted(wanted, key=lambda pair: pair[0].begin):
                    part = _read_part(file, piece, self._table[item.storage_index.fqn].dtype, item)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False

    def _piece(self, index: MetadataIndex) -> Piece:
        offsets = tuple(cast("torch.Size", index.offset))
        return next(piece for piece in self._table[index.fqn].pieces if piece.offsets == offsets)


def _metadata(stored: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in stored.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)


def _read_part(file: FileIO, piece: Piece, dtype: torch.dtype, item: ReadItem) -> Tensor:
    """The block of the piece that is asked for; of the first dimension no more is read than needed."""
    begin, sizes = piece.begin, list(piece.sizes)
    offsets = list(item.storage_offsets)
    if sizes and piece.end > piece.begin:
        begin += offsets[0] * ((piece.end - piece.begin) // sizes[0])
        sizes[0], offsets[0] = item.lengths[0], 0
    values = torch.empty(sizes, dtype=dtype)
    buffer = bytes_of(values) if values.numel() else memoryview(b"")
    file.seek(begin)
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise CheckpointError(f"`{file.name}` ended while it was read; another process has changed it.")
        buffer = buffer[count:]
    for dim, (offset, length) in enumerate(zip(offsets, item.lengths, strict=True)):
        values = values.narrow(dim, offset, length)
    return values


def load_into(leaves: Leaves, folder: Path, table: Table) -> None:
    """Fill the leaves from the checkpoint in `folder`, whatever layout it was saved in.

    Args:
        leaves: live tensors, each in the table with the same shape.
        folder: whose files are verified.
        table: what lies where.

    Raises:
        CheckpointError: a file that changed meanwhile.
        OSError: a file that cannot be read.
    """
    reader = FolderReader(folder, table)
    planner = LoadInto(leaves, reader.read_metadata())
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
