"""Checkpoints: a run's whole state on disk, complete or not there, read without executing anything."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.checkpoint.averaging import AveragedCheckpoint, average_checkpoints
    from evenstep.checkpoint.background import AsyncWriter, SaveResult
    from evenstep.checkpoint.emergency import discard_parts, join_parts, write_emergency, write_part
    from evenstep.checkpoint.export import export_weights
    from evenstep.checkpoint.folders import complete_checkpoints, step_name, step_update
    from evenstep.checkpoint.lock import LOCK, locked
    from evenstep.checkpoint.manifest import FileEntry, Manifest, UnreadableError
    from evenstep.checkpoint.mirror import Mirror
    from evenstep.checkpoint.ranks import ALONE, RankGroup, ended_on_all, on_all_ranks, patiently
    from evenstep.checkpoint.read import CheckpointReader, newest_checkpoint, read_checkpoint, verify
    from evenstep.checkpoint.replica import Replica
    from evenstep.checkpoint.retention import clean_leftovers, remove_checkpoint, retain
    from evenstep.checkpoint.shard import Shard, outline
    from evenstep.checkpoint.state import is_sharded, pack, unpack
    from evenstep.checkpoint.write import write_checkpoint

__all__ = [
    "ALONE",
    "LOCK",
    "AsyncWriter",
    "AveragedCheckpoint",
    "CheckpointReader",
    "FileEntry",
    "Manifest",
    "Mirror",
    "RankGroup",
    "Replica",
    "SaveResult",
    "Shard",
    "UnreadableError",
    "average_checkpoints",
    "clean_leftovers",
    "complete_checkpoints",
    "discard_parts",
    "ended_on_all",
    "export_weights",
    "is_sharded",
    "join_parts",
    "locked",
    "newest_checkpoint",
    "on_all_ranks",
    "outline",
    "pack",
    "patiently",
    "read_checkpoint",
    "remove_checkpoint",
    "retain",
    "step_name",
    "step_update",
    "unpack",
    "verify",
    "write_checkpoint",
    "write_emergency",
    "write_part",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".background": "AsyncWriter SaveResult",
        ".averaging": "AveragedCheckpoint average_checkpoints",
        ".emergency": "discard_parts join_parts write_emergency write_part",
        ".export": "export_weights",
        ".folders": "complete_checkpoints step_name step_update",
        ".lock": "LOCK locked",
        ".manifest": "FileEntry Manifest UnreadableError",
        ".mirror": "Mirror",
        ".ranks": "ALONE RankGroup ended_on_all on_all_ranks patiently",
        ".read": "CheckpointReader newest_checkpoint read_checkpoint verify",
        ".replica": "Replica",
        ".retention": "clean_leftovers remove_checkpoint retain",
        ".shard": "Shard outline",
        ".state": "is_sharded pack unpack",
        ".write": "write_checkpoint",
    },
)
