"""Reads a checkpoint back into a state, verifying every byte on the way and executing none.

Whoever names a checkpoint gets that one or an error; only `newest_checkpoint` falls back to an older one, and says
which it passed over and why. What the state is for is not known here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import cast, final

import torch
from torch import Tensor

from evenstep.checkpoint.layout import STATE, TENSORS_SUFFIX, checkpoints_folder, complete_checkpoints, locate
from evenstep.checkpoint.leaves import Leaves
from evenstep.checkpoint.manifest import Manifest
from evenstep.checkpoint.ranks import ALONE, Ranks, together
from evenstep.checkpoint.sharding import TABLE, Piece, Stored, Table, parse_table, piece_key
from evenstep.checkpoint.state import JSON, unpack
from evenstep.checkpoint.tensorfile import BadFileError, bytes_of, read_header, read_tensors
from evenstep.checkpoint.verify import check_structure, checked_file, verify, verify_files
from evenstep.errors import CheckpointError

TensorsByPart = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint as read.

    Args:
        path: its step folder.
        update: number of committed updates in the state.
        state: as it was given to `write_checkpoint`; tensors on the device that was asked for.
        manifest: what the checkpoint says of itself.
    """

    path: Path
    update: int
    state: dict[str, object]
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds, without the values of its tensors.

    Args:
        path: its step folder.
        manifest: what it says of itself.
        tensors: by `PART/TENSOR`: what each is, and where it lies.
        values: by part, what is not a tensor, as `state.json` has it.
    """

    path: Path
    manifest: Manifest
    tensors: Table
    values: dict[str, JSON]

    def tensor(self, name: str) -> Tensor:
        """The values of the tensor `PART/TENSOR`, as the files have them now.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for piece in stored.pieces:
            _block(whole, piece).copy_(read_piece(self.path, piece, stored.dtype))
        return whole


def look_into(path: Path | str) -> Contents:
    """What is in the checkpoint at `path`, or the newest complete one of the run there; reads no tensor.

    Raises:
        CheckpointError: no checkpoint there, or one whose files are not what the manifest says.
    """
    step = locate(Path(path))
    manifest = check_structure(step)
    with checked_file(step / STATE, manifest.files[STATE]) as file:
        values = parse_values(file.read(file.size))
    return Contents(path=step, manifest=manifest, tensors=read_table(step, manifest), values=values)


def read_piece(folder: Path, piece: Piece, dtype: torch.dtype) -> Tensor:
    """The values of a piece, unverified.

    Raises:
        CheckpointError: the file cannot be read.
    """
    values = torch.empty(piece.sizes, dtype=dtype)
    if not values.numel():
        return values
    buffer = bytes_of(values)
    try:
        with FileIO(folder / piece.file, "rb") as file:
            file.seek(piece.begin)
            while buffer:
                count = file.readinto(buffer)
                if not count:
                    raise CheckpointError(f"`{folder / piece.file}` ends before its tensors do; it is damaged.")
                buffer = buffer[count:]
    except OSError as error:
        raise CheckpointError(f"`{folder / piece.file}` cannot be read: {error.strerror}.") from error
    return values


def _block(whole: Tensor, piece: Piece) -> Tensor:
    for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def read_checkpoint(
    path: Path | str,
    device: torch.device | str = "cpu",
    *,
    into: Mapping[str, object] | None = None,
    group: Ranks = ALONE,
) -> Checkpoint:
    """The checkpoint at `path`, or the newest complete one of the run there.

    Args:
        path: a step folder, a folder of checkpoints or a run folder.
        device: where the tensors go that are not read into live ones.
        into: a state whose tensors are filled in place, whatever layout they have and the checkpoint was saved in:
            whole, DTensors, `Shard`s, on any number of ranks. Tensors of the checkpoint that are not in it are read
            whole; its values that are not tensors are not looked at.
        group: the ranks that read together, all of which call this; they share the verification.

    Raises:
        CheckpointError: no checkpoint there (the message lists what is), one that is damaged or foreign, or one that
            does not fit `into`, on any rank. Nothing has been changed then.

    >>> import tempfile
    >>> from evenstep.checkpoint import write_checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = write_checkpoint(Path(run) / "checkpoints", 10, {"model": {"bias": torch.ones(2)}})
    ...     read_checkpoint(run).state
    {'model': {'bias': tensor([1., 1.])}}
    """
    step = together(group, lambda: locate(Path(path)))[0]
    if into is None and group.ranks == 1:
        return _read_whole(step, torch.device(device))
    manifest = together(group, lambda: check_structure(step))[0]
    mine = sorted(manifest.files)[group.rank :: group.ranks]
    together(group, lambda: verify_files(step, {name: manifest.files[name] for name in mine}))
    reading = _Reading(step, manifest, into or {}, torch.device(device))
    together(group, reading.fit)  # only when all fit is anything changed
    together(group, reading.load)
    return Checkpoint(path=step, update=manifest.update, state=reading.state, manifest=manifest)


@final
class _Reading:
    """One rank's part in reading into live tensors, in steps that all ranks take together."""

    def __init__(self, step: Path, manifest: Manifest, into: Mapping[str, object], device: torch.device) -> None:
        self._step, self._manifest, self._into, self._device = step, manifest, into, device
        self._live: Mapping[str, object] = {}
        self._table: Table = {}
        self._skeletons: dict[str, JSON] = {}
        self.state: dict[str, object] = {}

    def fit(self) -> None:
        """Find out what is there, and that it fits what is live."""
        self._table = read_table(self._step, self._manifest)
        with checked_file(self._step / STATE, self._manifest.files[STATE]) as file:
            self._skeletons = parse_values(file.read(file.size))
        leaves = Leaves()
        leaves.pack(self._into, alone=False)
        self._live = leaves.by_name()
        _check_fits(self._step, self._live, self._table)

    def load(self) -> None:
        """Fill what is live, read the rest whole, and put all in its place in the state."""
        from evenstep.checkpoint.planning import load_into

        rest = {name: one for name, one in self._table.items() if name not in self._live}
        fresh = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in rest.items()}
        try:
            load_into({**self._live, **fresh}, self._step, self._table)
        except OSError as error:
            raise CheckpointError(f"`{error.filename or self._step}` cannot be read: {error.strerror}.") from error
        tensors: TensorsByPart = {}
        for name, leaf in {**self._live, **{key: tensor.to(self._device) for key, tensor in fresh.items()}}.items():
            part, _, inner = name.partition("/")
            tensors.setdefault(part, {})[inner] = cast("Tensor", leaf)
        self.state = unpacked(self._step, self._skeletons, tensors)


def read_table(step: Path, manifest: Manifest) -> Table:
    """What lies where in the checkpoint `step`, whatever its layout: by `PART/TENSOR`.

    Raises:
        CheckpointError: a table or a header that cannot be true.
    """
    if TABLE in manifest.files:
        with checked_file(step / TABLE, manifest.files[TABLE]) as file:
            return parse_table(parse_values(file.read(file.size)), manifest.files)
    table: dict[str, Stored] = {}
    for name, entry in manifest.files.items():
        if name.endswith(TENSORS_SUFFIX):
            part = name.removesuffix(TENSORS_SUFFIX)
            with checked_file(step / name, entry, whole=False) as file:
                for tensor in read_header(file):
                    head = entry.bytes - file.rest
                    zero = (0,) * len(tensor.shape)
                    begin, end = head + tensor.begin, head + tensor.end
                    piece = Piece(offsets=zero, sizes=tensor.shape, file=name, begin=begin, end=end)
                    table[f"{part}/{tensor.name}"] = Stored(dtype=tensor.dtype, shape=tensor.shape, pieces=(piece,))
    return table


def _check_fits(step: Path, live: Mapping[str, object], table: Table) -> None:
    faults = [f"`{name}` is not in it" for name in live if name not in table]
    for name, leaf in live.items():
        shape = tuple(cast("Tensor", leaf).size())
        if name in table and table[name].shape != shape:
            faults.append(f"`{name}` has shape {list(table[name].shape)} instead of {list(shape)}")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(
            f"the checkpoint `{step}` does not fit what it is read into: {'; '.join(faults[:5])}{more}. Build the "
            f"model and the optimizer that it was saved from."
        )


def _read_whole(step: Path, device: torch.device) -> Checkpoint:
    """The checkpoint by one process, each byte hashed while it is read."""
    manifest = check_structure(step)
    files: dict[str, dict[str, Tensor]] = {}
    skeletons: dict[str, JSON] = {}
    table: Table | None = None
    for name, entry in manifest.files.items():
        with checked_file(step / name, entry) as file:
            if name.endswith(TENSORS_SUFFIX):
                files[name] = read_tensors(file, device)
            elif name == STATE:
                skeletons = parse_values(file.read(file.size))
            elif name == TABLE:
                table = parse_table(parse_values(file.read(file.size)), manifest.files)
            else:
                raise BadFileError("is of no known kind")
    if table is None:
        tensors = {name.removesuffix(TENSORS_SUFFIX): each for name, each in files.items()}
    else:
        tensors = _assembled(step, table, files, device)
    state = unpacked(step, skeletons, tensors)
    return Checkpoint(path=step, update=manifest.update, state=state, manifest=manifest)


def _assembled(step: Path, table: Table, files: dict[str, dict[str, Tensor]], device: torch.device) -> TensorsByPart:
    """Whole tensors from the pieces in `files`, which are used up."""
    tensors: TensorsByPart = {}
    for name, stored in table.items():
        whole = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        for piece in stored.pieces:
            found = files.get(piece.file, {}).pop(piece_key(name, piece.offsets), None)
            if found is None or found.dtype != stored.dtype or tuple(found.shape) != piece.sizes:
                raise CheckpointError(f"`{step / piece.file}` does not hold what `{TABLE}` says of `{name}`.")
            _block(whole, piece).copy_(found)
        part, _, inner = name.partition("/")
        tensors.setdefault(part, {})[inner] = whole
    if spare := next(((file, key) for file, pieces in files.items() for key in pieces), None):
        raise CheckpointError(f"`{step / spare[0]}` holds `{spare[1]}`, which `{TABLE}` does not mention.")
    return tensors


def unpacked(step: Path, skeletons: Mapping[str, JSON], tensors: TensorsByPart) -> dict[str, object]:
    """The state of these values and tensors, by part.

    Raises:
        CheckpointError: they do not belong together.
    """
    if spare := tensors.keys() - skeletons.keys():
        name = f"{min(spare)}{TENSORS_SUFFIX}"
        raise CheckpointError(f"`{step / name}` is not mentioned in `{STATE}`; do not trust it.")
    return {part: unpack(skeleton, tensors.get(part, {}), part) for part, skeleton in skeletons.items()}


def newest_checkpoint(
    folder: Path | str, device: torch.device | str = "cpu"
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest checkpoint that can be read, and the newer ones that cannot, each with the reason.

    Args:
        folder: a folder of checkpoints or a run folder; need not exist.
        device: where the tensors go.

    Raises:
        CheckpointError: a folder that cannot be listed.

    >>> newest_checkpoint("runs/none")
    (None, [])
    """
    rejected: list[tuple[Path, str]] = []
    for path in reversed(complete_checkpoints(checkpoints_folder(Path(folder)))):
        try:
            return read_checkpoint(path, device), rejected
        except CheckpointError as error:
            rejected.append((path, str(error)))
    return None, rejected


def newest_valid(folder: Path | str) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint whose every byte is as it was written, and the newer ones that are not, with the reasons.

    Args:
        folder: a folder of checkpoints or a run folder; need not exist.

    Raises:
        CheckpointError: a folder that cannot be listed.
    """
    rejected: list[tuple[Path, str]] = []
    for path in reversed(complete_checkpoints(checkpoints_folder(Path(folder)))):
        try:
            verify(path)
        except CheckpointError as error:
            rejected.append((path, str(error)))
        else:
            return path, rejected
    return None, rejected


def parse_values(data: bytes) -> dict[str, JSON]:
    """What `state.json` or `tensors.json` holds.

    Raises:
        BadFileError: it is no JSON object.
    """
    try:
        content: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise BadFileError("is not a JSON object")
    return cast("dict[str, JSON]", content)
