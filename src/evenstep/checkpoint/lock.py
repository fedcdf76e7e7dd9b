"""Lock of a run folder, which belongs to one run at a time.

The operating system's lock on the file `.lock` ends with the process. A JSON file beside it names the holder.
"""

import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from evenstep.checkpoint.folders import disk_error
from evenstep.errors import CheckpointError
from evenstep.files import replacing

LOCK, HOLDER = ".lock", ".lock.json"


@contextmanager
def locked(folder: Path) -> Generator[str]:
    """Hold the run folder inside the `with`, or raise CheckpointError; gives a sentence on a lock that it took over."""
    lock = FileLock(folder / LOCK, thread_local=False)
    holder = folder / HOLDER
    since = datetime.now(UTC).isoformat(timespec="seconds")
    mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        left = _described(holder) if holder.exists() else ""
        with replacing(holder, sync=False) as new:
            new.write_text(mine)
    except Timeout as error:
        raise CheckpointError(
            f"the run folder `{folder}` is in use by {_described(holder)}; wait for it to end, or give this run "
            f"another name. If that process is gone for certain, delete `{folder / LOCK}`."
        ) from error
    except OSError as error:
        if lock.is_locked:
            lock.release()
            (folder / LOCK).unlink(missing_ok=True)
        raise disk_error(f"the run folder `{folder}` cannot be locked", error) from error
    try:
        yield f"took over the lock of {left}, which ended without releasing it" if left else ""
    finally:
        if holder.exists() and holder.read_text() == mine:  # else the folder was deleted and taken by another run
            holder.unlink()
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def _described(holder: Path) -> str:
    try:
        content = json.loads(holder.read_bytes())
        return f"process {content['pid']} on {content['host']}, since {content['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # cut off, or foreign
        return "another process"
