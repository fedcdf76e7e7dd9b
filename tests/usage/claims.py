"""What a claim of the support matrix is: a sentence, whether it is supported or refused, and what shows it.

A claim that nothing shows is printed as *untested*; there is no other way to say so.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a claim ends."""

    WORKS = "works"
    REFUSED = "refused"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the support matrix.

    Args:
        kind: whether it works, is refused when the run is built, or is a limit to know of.
        text: what, in a few words; for a refusal with its reason.
        shown_by: tests as "unit/train/test_x.py::test_y" below `tests/`, rows of the proofs as "prove: part of the
            name", faults of the battery as "faults: part of the name". None: it is untested. Tests below `gpu/` show
            something only if they have passed on a device, in a file of results of `make gpu`.
    """

    kind: Kind
    text: str
    shown_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Area:
    """Claims about one subject, under its headline."""

    name: str
    claims: tuple[Claim, ...]


def works(text: str, *shown_by: str) -> Claim:
    """Something that is supported."""
    return Claim(Kind.WORKS, text, shown_by)


def refused(text: str, *shown_by: str) -> Claim:
    """Something that is refused, by name, when the run is built or before anything is trained."""
    return Claim(Kind.REFUSED, text, shown_by)


def limit(text: str, *shown_by: str) -> Claim:
    """What is true of something that works, and whoever uses it should know."""
    return Claim(Kind.LIMIT, text, shown_by)
