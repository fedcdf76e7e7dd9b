"""Checkpoints: a run's whole state on disk, complete or not there, read without executing anything."""

from typing import TYPE_CHECKING

from evenstep.checkpoint.verify import verify
from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.checkpoint.emergency import find_failure, write_emergency, write_failure
    from evenstep.checkpoint.layout import complete_checkpoints, step_name
    from evenstep.checkpoint.lock import LOCK, locked
    from evenstep.checkpoint.manifest import FileEntry, Manifest
    from evenstep.checkpoint.parts import discard_parts, join_parts, write_part
    from evenstep.checkpoint.ranks import Ranks
    from evenstep.checkpoint.reader import (
        Checkpoint,
        Contents,
        look_into,
        newest_checkpoint,
        newest_valid,
        read_checkpoint,
    )
    from evenstep.checkpoint.retention import clean_leftovers, remove_checkpoint, retain
    from evenstep.checkpoint.saver import Saved, Saver
    from evenstep.checkpoint.sharding import Shard, outline
    from evenstep.checkpoint.state import is_sharded, pack
    from evenstep.checkpoint.storage import Disk, LocalDisk
    from evenstep.checkpoint.used import trained_before
    from evenstep.checkpoint.writer import write_checkpoint

__all__ = [
    "LOCK",
    "Checkpoint",
    "Contents",
    "Disk",
    "FileEntry",
    "LocalDisk",
    "Manifest",
    "Ranks",
    "Saved",
    "Saver",
    "Shard",
    "clean_leftovers",
    "complete_checkpoints",
    "discard_parts",
    "find_failure",
    "is_sharded",
    "join_parts",
    "locked",
    "look_into",
    "newest_checkpoint",
    "newest_valid",
    "outline",
    "pack",
    "read_checkpoint",
    "remove_checkpoint",
    "retain",
    "step_name",
    "trained_before",
    "verify",
    "write_checkpoint",
    "write_emergency",
    "write_failure",
    "write_part",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".emergency": "find_failure write_emergency write_failure",
        ".layout": "complete_checkpoints step_name",
        ".lock": "LOCK locked",
        ".manifest": "FileEntry Manifest",
        ".parts": "discard_parts join_parts write_part",
        ".ranks": "Ranks",
        ".reader": "Checkpoint Contents look_into newest_checkpoint newest_valid read_checkpoint",
        ".retention": "clean_leftovers remove_checkpoint retain",
        ".saver": "Saved Saver",
        ".sharding": "Shard outline",
        ".state": "is_sharded pack",
        ".storage": "Disk LocalDisk",
        ".used": "trained_before",
        ".writer": "write_checkpoint",
    },
)
