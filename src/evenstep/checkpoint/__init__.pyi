# ruff: noqa: I001 - it would write a statement per name

from evenstep.checkpoint.averaging import average_checkpoints as average_checkpoints
from evenstep.checkpoint.background import (
    AsyncWriter as AsyncWriter,
    Replica as Replica,
    SaveResult as SaveResult,
)
from evenstep.checkpoint.weights import export_weights as export_weights
from evenstep.checkpoint.folders import (
    complete_checkpoints as complete_checkpoints,
    step_name as step_name,
    step_update as step_update,
)
from evenstep.checkpoint.lock import (
    LOCK as LOCK,
    locked as locked,
)
from evenstep.checkpoint.manifest import (
    FileEntry as FileEntry,
    Manifest as Manifest,
    UnreadableError as UnreadableError,
)
from evenstep.checkpoint.mirror import Mirror as Mirror
from evenstep.checkpoint.ranks import (
    ALONE as ALONE,
    RankGroup as RankGroup,
    ended_on_all as ended_on_all,
    on_all_ranks as on_all_ranks,
)
from evenstep.checkpoint.read import (
    CheckpointReader as CheckpointReader,
    read_checkpoint as read_checkpoint,
    verify as verify,
)
from evenstep.checkpoint.retention import (
    clean_leftovers as clean_leftovers,
    remove_checkpoint as remove_checkpoint,
    retain as retain,
)
from evenstep.checkpoint.shard import (
    Shard as Shard,
    is_sharded as is_sharded,
    outline as outline,
)
from evenstep.checkpoint.state import (
    pack as pack,
    unpack as unpack,
)
from evenstep.checkpoint.write import (
    write_checkpoint as write_checkpoint,
    write_emergency as write_emergency,
)
