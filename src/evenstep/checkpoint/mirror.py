"""Copies of a run's checkpoints in an object store, such as an S3 bucket, for when the run folder is lost.

    MIRROR/NAME/step-00001000/    what the folder of the same name holds, in a run folder called NAME

An object store cannot rename, but an object is there whole or not at all. So the manifest is the last that is written
and the first that is removed: a copy without it is absent. What was copied is verified when it is fetched, into a
folder that gets its name when every byte has its checksum. Which checkpoints are worth a copy is not decided here.
"""

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, final

from evenstep.checkpoint import storage
from evenstep.checkpoint.damage import UnreadableError, named_errors
from evenstep.checkpoint.folders import SAVING, step_update
from evenstep.checkpoint.integrity import check_checksum
from evenstep.checkpoint.manifest import MANIFEST, parse_manifest, read_manifest
from evenstep.checkpoint.retention import discard, superseded
from evenstep.checkpoint.tensorfile import CHUNK_BYTES
from evenstep.checkpoint.writer import write_file
from evenstep.errors import ArgumentError, CheckpointError, MissingExtraError, clause

_PROBE = ".probe"
_AHEAD_BYTES = 32 << 20
_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3")}
_ADVICE = {
    "NoCredentialsError": "give credentials as its library takes them, such as AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY in the environment of all ranks",
    "FileNotFoundError": "make the bucket first, or correct its name",
    "PermissionError": "give these credentials the right to list, read, write and delete there",
}


@final
class Mirror:
    """The copies of the checkpoints of one run.

    Args:
        address: where runs have their copies, as fsspec writes it: `s3://BUCKET/FOLDER`.
        name: of the run folder.

    Raises:
        ArgumentError: no such address.
        MissingExtraError: the package that reaches it is not installed.

    >>> Mirror("memory://copies", "digits").steps()
    []
    """

    def __init__(self, address: str, name: str) -> None:
        from fsspec.core import url_to_fs

        self.address = f"{address.rstrip('/')}/{name}"
        protocol = address.partition("://")[0]
        # of the kinds of store that are known here, only disks have folders, which must be made and removed
        self._has_folders = protocol in ("file", "local")
        try:
            found: tuple[Any, str] = url_to_fs(self.address, **({"auto_mkdir": True} if self._has_folders else {}))
        except ImportError as error:
            if protocol in _EXTRAS:
                raise MissingExtraError(*_EXTRAS[protocol]) from error
            raise ArgumentError(
                f"`mirror` is {address!r}, which can't be reached: {clause(error)}.", field="mirror"
            ) from error
        except ValueError as error:
            raise ArgumentError(
                f"`mirror` must be an address that fsspec knows, such as 's3://BUCKET/FOLDER', but is {address!r}: "
                f"{clause(error)}.",
                field="mirror",
            ) from error
        self._store, self._root = found

    @classmethod
    def of_run(cls, address: str, folder: Path) -> Self:
        """The copies of the checkpoints of the run in `folder`, whose name they have."""
        return cls(address, folder.absolute().name)

    def check(self) -> None:
        """Raise CheckpointError unless copies can be listed, written, read and removed there; leaves nothing."""
        self.steps()
        path, written = f"{self._root}/{_PROBE}", b"evenstep"
        with self._named("written, read and removed"):
            self._store.pipe_file(path, written)
            read = self._store.cat_file(path)
            self._store.rm_file(path)
        if read != written:
            raise CheckpointError(f"the mirror `{self.address}` gave back other bytes than were written; don't use it.")

    def check_unused(self) -> None:
        """Raise ArgumentError if there are copies already, for a run that has made none."""
        steps = self.steps()
        if steps:
            raise ArgumentError(
                f"`{self.address}` holds copies of checkpoints up to {steps[-1]}, of a run of this name; nothing was "
                f"touched. To go on with that run: `--resume auto`, or `trainer.resume()` before `trainer.train()`; to "
                f"train another: give it another name or folder, or another `mirror`; to start over: delete them first."
            )

    def steps(self) -> list[str]:
        """The names of the checkpoints that are there, the oldest first."""
        return [name for name, files in self._listed().items() if MANIFEST in files]

    def upload(self, step: Path, names: Collection[str]) -> None:
        """Copy the files `names` of the checkpoint `step`, of which there must be no copy.

        Raises:
            CheckpointError: they can't be copied.
        """
        with self._named("written"):
            for name in names:
                self._store.put_file(str(step / name), f"{self._root}/{step.name}/{name}")

    def publish(self, step: Path) -> None:
        """Make a checkpoint of the files that were copied of `step`, by whichever rank.

        Raises:
            CheckpointError: not all are there, or the manifest can't be written.
        """
        manifest, there = read_manifest(step), self._listed().get(step.name, {})
        missing = sorted(name for name, entry in manifest.files.items() if there.get(name) != entry.bytes)
        if missing:
            raise CheckpointError(
                f"the mirror `{self.address}` did not get all of {step.name}: {', '.join(missing)} is not there, or of "
                f"another size, so the copy does not count."
            )
        with self._named("written"):
            self._store.pipe_file(f"{self._root}/{step.name}/{MANIFEST}", (step / MANIFEST).read_bytes())

    def copy(self, step: Path) -> None:
        """Copy the checkpoint `step`, by one process, in place of a copy that is there.

        Raises:
            CheckpointError: it can't be copied.
        """
        self.remove(step.name)
        self.upload(step, read_manifest(step).files)
        self.publish(step)

    def fetch(self, name: str, folder: Path) -> Path:
        """Put the copy `name` into the folder of checkpoints `folder`; gives the step folder.

        Raises:
            UnreadableError: the copy is damaged, and not there in `folder`.
            CheckpointError: it can't be read, or the disk does not take it.
        """
        target, staging = folder / name, folder / f"{SAVING}{name}"
        data = b"".join(self._chunks(name, MANIFEST))
        with named_errors(f"{self.address}/{name}/{MANIFEST}"):
            manifest = parse_manifest(data, f"{self.address}/{name}/{MANIFEST}")
        try:
            if staging.exists():
                discard(staging)
            storage.make_folder(staging)
            for file, entry in manifest.files.items():
                written = write_file(staging / file, self._chunks(name, file))
                check_checksum(f"{self.address}/{name}/{file}", written.crc32, entry)
            write_file(staging / MANIFEST, [data])
            storage.sync_folder(staging)
            storage.rename(staging, target)
            storage.sync_folder(folder)
        except OSError as error:
            raise CheckpointError(
                f"`{self.address}/{name}` can't be fetched, as `{error.filename or target}` can't be written: "
                f"{error.strerror or error}."
            ) from error
        return target

    def retain(self, *, keep_last: int | None, keep_every_updates: int | None, protect: Collection[str]) -> None:
        """Remove all copies but those that `retain` would keep of such checkpoints.

        Raises:
            CheckpointError: one can't be removed.
        """
        for name in superseded(self.steps(), keep_last, keep_every_updates, protect):
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a copy, its manifest first.

        Raises:
            CheckpointError: it can't be removed.
        """
        files = sorted(self._listed().get(name, {}), key=lambda file: (file != MANIFEST, file))
        with self._named("removed"):
            for file in files:
                with suppress(FileNotFoundError):
                    self._store.rm_file(f"{self._root}/{name}/{file}")
            if files and self._has_folders:
                with suppress(OSError):  # a file that is open elsewhere keeps a name on NFS
                    self._store.rmdir(f"{self._root}/{name}")

    def clean(self) -> list[str]:
        """Remove what killed processes have left half copied, or half removed; gives a sentence for each thing done."""
        left = [name for name, files in self._listed().items() if MANIFEST not in files]
        for name in left:
            self.remove(name)
        return [f"removed `{self.address}/{name}`, left by a copy that was cut off" for name in left]

    def _listed(self) -> dict[str, dict[str, int]]:
        with self._named("listed"):
            self._store.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._store.find(self._root, detail=True)
        steps: dict[str, dict[str, int]] = {}
        for path, entry in found.items():
            *_, step, file = path.split("/")
            if step_update(step) is not None:
                steps.setdefault(step, {})[file] = entry["size"]
        return dict(sorted(steps.items(), key=lambda step: step_update(step[0]) or 0))

    def _chunks(self, name: str, file: str) -> Iterator[bytes]:
        with self._named("read"):
            try:
                with self._store.open(f"{self._root}/{name}/{file}", "rb", block_size=_AHEAD_BYTES) as source:
                    while chunk := source.read(CHUNK_BYTES):
                        yield chunk
            except FileNotFoundError as error:
                raise UnreadableError(f"`{self.address}/{name}/{file}` is not there, so that copy is none.") from error

    @contextmanager
    def _named(self, what: str) -> Generator[None]:
        try:
            yield
        except (CheckpointError, GeneratorExit):
            raise
        except Exception as error:  # each library has errors of its own
            advice = _ADVICE.get(type(error).__name__, "look at the address, the network and the store")
            raise CheckpointError(
                f"copies of checkpoints can't be {what} at `{self.address}`: {clause(error)}; {advice}."
            ) from error
