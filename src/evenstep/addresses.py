"""Refuses addresses of object stores where a folder or file of this machine is read, and says how to get one.

Copies of checkpoints in a store are what a run goes on from when its folder is lost (`checkpoint.mirror`); nothing else
reads a store. It loads no torch.
"""

import re
from pathlib import Path

from evenstep.errors import ArgumentError

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*[^/])/*")  # `Path` leaves one slash of two
_STEP = re.compile(r"step-\d{8,}")


def check_here(path: Path | str) -> None:
    """Raise ArgumentError for an address; anything else is for the reader to judge.

    >>> check_here("runs/digits")
    >>> check_here("s3://bucket/run")
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `s3://bucket/run` is an address, but what is read must be on this ...
    """
    protocol, place = _parts(path)
    if not protocol:
        return
    fetch = f"fsspec.filesystem('{protocol}').get('{place}', '{Path(place).name}', recursive=True)"
    raise ArgumentError(
        f"`{protocol}://{place}` is an address, but what is read must be on this machine; fetch it first: "
        f'`python -c "import fsspec; {fetch}"`, which makes `{Path(place).name}`.'
    )


def from_copies(path: str) -> str:
    """What to set to go on with a run from its copies at an address; "" for anything else.

    >>> from_copies("s3://bucket/runs/digits/step-00001000")
    '`--checkpoint.mirror s3://bucket/runs --name digits --resume auto` goes on from the newest of these copies.'
    """
    protocol, place = _parts(path)
    if not protocol:
        return ""
    parts = place.split("/")
    folder, name = "/".join(parts[:-1]), parts[-1]
    if _STEP.fullmatch(name) and len(parts) > 2:
        folder, name = "/".join(parts[:-2]), parts[-2]
    settings = f"--checkpoint.mirror {protocol}://{folder} --name {name} --resume auto"
    return f"`{settings}` goes on from the newest of these copies."


def _parts(path: Path | str) -> tuple[str, str]:
    """The protocol of an address and what follows it; two empty texts for what is none, or is here."""
    found = _ADDRESS.fullmatch(str(path))
    if found is None or Path(path).exists():
        return "", ""
    protocol, place = found.groups()
    return protocol, f"/{place}" if protocol in ("file", "local") else place
