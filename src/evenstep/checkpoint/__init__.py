"""Checkpoints: a run's whole state on disk, complete or not there, read without executing anything."""

from evenstep.checkpoint.layout import complete_checkpoints, step_name
from evenstep.checkpoint.manifest import FileEntry, Manifest
from evenstep.checkpoint.reader import Checkpoint, newest_checkpoint, read_checkpoint
from evenstep.checkpoint.retention import clean_leftovers, remove_checkpoint, retain
from evenstep.checkpoint.sharding import Shard
from evenstep.checkpoint.storage import Disk, LocalDisk
from evenstep.checkpoint.verify import verify
from evenstep.checkpoint.writer import write_checkpoint

__all__ = [
    "Checkpoint",
    "Disk",
    "FileEntry",
    "LocalDisk",
    "Manifest",
    "Shard",
    "clean_leftovers",
    "complete_checkpoints",
    "newest_checkpoint",
    "read_checkpoint",
    "remove_checkpoint",
    "retain",
    "step_name",
    "verify",
    "write_checkpoint",
]
