"""The table of a profile: which operators took the time of some updates, out of the files that the profiler has left.

Of several profiles the newest is shown, and of its ranks the first. Times are as the profiler gives them, without those
of operators that are called by others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from evenstep.extras.report.files import Files

FOLDER = "profile"
_MOST = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of torch's, or a named range.

    Args:
        host_s: seconds of the host's, its own.
        device_s: seconds of the accelerator's, likewise.
    """

    name: str
    calls: int
    host_s: float
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A profile of updates `first` to `last`, on one rank.

    Args:
        trace: the file to open in a viewer, "" where it is gone.
        operators: those that took the most time.
        num_operators: how many there are.
        host_s: of all of them; likewise `device_s`.
    """

    first: int
    last: int
    rank: int
    device: str
    trace: str
    operators: tuple[Operator, ...]
    num_operators: int
    host_s: float
    device_s: float


def read_profile(files: Files) -> Profiled | None:
    """The newest profile in a run folder; None where there is none, or none that can be read."""
    found: list[Profiled] = []
    for path in sorted((files.folder / FOLDER).glob("*.operators.json")):
        name = f"{FOLDER}/{path.name}"
        trace = f"{FOLDER}/{path.name.removesuffix('.operators.json')}.trace.json.gz"
        parse = partial(_profile, trace=trace if files.has(trace) else "")
        profiled = files.parsed(name, parse, "the profile is left out")
        if profiled is not None:
            found.append(profiled)
    return max(found, key=lambda one: (one.last, -one.rank), default=None)


def _profile(content: Mapping[str, object], trace: str) -> Profiled | None:
    match content:
        case {
            "updates": [int(first), int(last)],
            "rank": int(rank),
            "device": str(device),
            "operators": list(listed),
        } if 0 <= first <= last < 2**53 and rank >= 0:
            operators = [_operator(one) for one in cast("list[object]", listed)]
        case _:
            return None
    known = [one for one in operators if one is not None]
    if len(known) < len(operators):
        return None
    known.sort(key=lambda one: -(one.host_s + one.device_s))
    return Profiled(
        first=first,
        last=last,
        rank=rank,
        device=device,
        trace=trace,
        operators=tuple(known[:_MOST]),
        num_operators=len(known),
        host_s=sum(one.host_s for one in known),
        device_s=sum(one.device_s for one in known),
    )


def _operator(entry: object) -> Operator | None:
    match entry:
        case {
            "name": str(name),
            "calls": int(calls),
            "self_us": float() | int() as host,
            "device_self_us": float() | int() as device,
        } if 0 <= host < 1e15 and 0 <= device < 1e15:
            return Operator(name=name, calls=calls, host_s=1e-6 * host, device_s=1e-6 * device)
        case _:
            return None
