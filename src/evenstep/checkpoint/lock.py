"""A run folder belongs to one run at a time.

The lock is the operating system's lock on a file, which ends with the process that holds it, however it ends; the
file's content (host, process, time) is for people, and is how a lock that was left behind is told. Where the file
system has no locks, the content alone decides.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from evenstep.errors import CheckpointError

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Generator[str]:
    """Hold the run folder inside the `with`; gives a sentence on the lock that was taken over, or "".

    Raises:
        CheckpointError: another run holds it, or the folder cannot be written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     with locked(Path(run)):
    ...         sorted(file.name for file in Path(run).iterdir())
    ['.lock']
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(path)
    except OSError as error:
        raise _unlockable(folder, error) from error
    try:
        try:
            left = _read(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_self()).encode(), 0)
        except OSError as error:
            raise _unlockable(folder, error) from error
        yield f"took over the lock of {_described(left)}, which has ended without giving it back" if left else ""
    finally:
        if _is_at(descriptor, path):  # else the folder was deleted meanwhile, and the file is another run's
            path.unlink(missing_ok=True)  # before it is let go, so that nobody locks a file that is about to vanish
        os.close(descriptor)


def _unlockable(folder: Path, error: OSError) -> CheckpointError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "free some space" if full else "make it writable"
    return CheckpointError(
        f"the run folder `{folder}` cannot be locked: {error.strerror}; {advice} or put the run elsewhere."
    )


def _opened(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever held it has just removed it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read(descriptor)
        no_locks = error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) and not no_locks:
            raise
        if no_locks and not (holder and _may_live(holder)):
            return
        raise CheckpointError(
            f"the run folder `{path.parent}` is in use by {_described(holder)}; wait for it to end, or give this run "
            f"another name. If that process is gone for certain, delete `{path}`."
        ) from error


def _self() -> dict[str, str | int]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}


def _read(descriptor: int) -> dict[str, object]:
    try:
        content: object = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {"host": "?"}
    return cast("dict[str, object]", content) if isinstance(content, dict) else {"host": "?"}


def _may_live(holder: dict[str, object]) -> bool:
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _described(holder: dict[str, object]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
