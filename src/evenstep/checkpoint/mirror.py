"""Copies of a run's checkpoints in an object store, as `MIRROR/RUN/step-…`, for when the run folder is lost.

An object store cannot rename, so the manifest is written last and removed first: a copy without it is absent.
"""

from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from evenstep import files
from evenstep.checkpoint.folders import MANIFEST, disk_errors, step_update
from evenstep.checkpoint.manifest import UnreadableError, read_manifest
from evenstep.checkpoint.read import verify
from evenstep.checkpoint.retention import superseded
from evenstep.errors import ArgumentError, CheckpointError, MissingExtraError, clause


@final
class Mirror:
    """The copies of the checkpoints of one run.

    Args:
        address: of the copies of all runs, as fsspec writes it: `s3://BUCKET/FOLDER`.
        run: the run folder, whose name the copies have.

    >>> Mirror("memory://copies", "digits").steps()
    []
    """

    def __init__(self, address: str, run: Path | str) -> None:
        from fsspec.core import url_to_fs

        self.address = f"{address.rstrip('/')}/{Path(run).absolute().name}"
        protocol = address.partition("://")[0]
        # only disks have folders, which must be made and removed
        self._has_folders = protocol in ("file", "local")
        options: dict[str, Any] = {"auto_mkdir": True} if self._has_folders else {}
        try:
            found: tuple[Any, str] = url_to_fs(self.address, **options)
        except (ImportError, ValueError) as error:
            if isinstance(error, ImportError) and protocol in ("s3", "s3a"):
                raise MissingExtraError("s3fs", "s3") from error
            raise ArgumentError(
                f"`mirror` must be an address that fsspec knows, such as 's3://BUCKET/FOLDER', but is {address!r}: "
                f"{clause(error)}.",
                field="mirror",
            ) from error
        self._store, self._root = found

    def check_unused(self) -> None:
        """Raise ArgumentError if there are copies of an earlier run."""
        steps = self.steps()
        if steps:
            raise ArgumentError(
                f"`{self.address}` holds copies of another run, up to {steps[-1]}. Go on with that run "
                f"(`--resume auto`, `trainer.resume()`), or give another `folder` or `mirror`.",
                field="mirror",
            )

    def steps(self) -> list[str]:
        """The names of the complete copies, the oldest first."""
        return [name for name, files in self._listed().items() if MANIFEST in files]

    def upload(self, step: Path, names: Collection[str]) -> None:
        """Copy the files `names` of the checkpoint `step`, which has no copy yet."""
        with self._named("written"):
            for name in names:
                self._store.put_file(str(step / name), f"{self._root}/{step.name}/{name}")

    def publish(self, step: Path) -> None:
        """Copy the manifest of `step`, after all ranks have copied their files."""
        there = self._listed().get(step.name, {})
        missing = [name for name, entry in read_manifest(step).files.items() if there.get(name) != entry.bytes]
        if missing:
            raise CheckpointError(
                f"the copy of {step.name} in `{self.address}` is not complete: {', '.join(missing)} is missing or cut."
            )
        with self._named("written"):
            self._store.pipe_file(f"{self._root}/{step.name}/{MANIFEST}", (step / MANIFEST).read_bytes())

    def copy(self, step: Path) -> None:
        """Copy the checkpoint `step` by one process, and replace an older copy."""
        self.remove(step.name)
        self.upload(step, read_manifest(step).files)
        self.publish(step)

    def fetch(self, name: str, folder: Path) -> Path:
        """Download the copy `name` into the folder of checkpoints `folder`, and verify it; gives the step folder."""
        target = folder / name
        try:
            with disk_errors(f"`{self.address}/{name}` can't be fetched"):
                files.make_folder(folder)
                with files.replacing(target) as new:
                    new.mkdir()
                    self._download(name, MANIFEST, new)
                    for file in read_manifest(new).files:
                        self._download(name, file, new)
                    verify(new)
        except UnreadableError as error:
            raise UnreadableError(f"the copy `{self.address}/{name}` can't be used: {error}") from error
        return target

    def retain(self, *, keep_last: int | None, keep_every_updates: int | None, protect: Collection[str]) -> None:
        """Remove the copies that `evenstep.checkpoint.retain` would delete."""
        for name in superseded(self.steps(), keep_last, keep_every_updates, protect):
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a copy, its manifest first."""
        files = sorted(self._listed().get(name, {}), key=lambda file: (file != MANIFEST, file))
        with self._named("removed"):
            for file in files:
                with suppress(FileNotFoundError):
                    self._store.rm_file(f"{self._root}/{name}/{file}")
            if files and self._has_folders:
                with suppress(OSError):  # a file that is open elsewhere keeps a name on NFS
                    self._store.rmdir(f"{self._root}/{name}")

    def clean(self) -> list[str]:
        """Remove incomplete copies of killed processes; gives a sentence for each."""
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

    def _download(self, name: str, file: str, to: Path) -> None:
        with self._named("read"):
            try:
                self._store.get_file(f"{self._root}/{name}/{file}", str(to / file))
            except FileNotFoundError as error:
                raise UnreadableError(f"`{file}` is missing.") from error

    @contextmanager
    def _named(self, what: str) -> Generator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each library has its own errors
            raise CheckpointError(
                f"copies of checkpoints can't be {what} at `{self.address}`: {clause(error)}; look at the address, the "
                f"credentials and the store."
            ) from error
