"""Starts the ranks of `rank.py` as processes, and gives what each of them said and how it ended."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import Script, started

SCRIPT = Path(__file__).with_name("rank.py")
LIMIT_S = 300  # for the slowest of machines


@dataclass(frozen=True, slots=True)
class Said:
    """What one process said.

    Args:
        code: its exit code.
        said: its line of JSON; {} if it left none.
        err: its standard error.
        seconds: until it ended, since all were started.
    """

    code: int | None
    said: dict[str, Any]
    err: str
    seconds: float


def run(ranks: int, *, frozen: tuple[int, ...] = (), **what: Any) -> list[Said]:
    """Run all ranks to their ends; those that are `frozen` are killed when the others have ended."""
    Path(what["folder"]).mkdir(parents=True, exist_ok=True)
    began, given = time.monotonic(), (SCRIPT, json.dumps(what))
    scripts = started(*given, ranks=range(ranks), world=ranks) if ranks > 1 else [Script(*given)]
    ends: dict[int, float] = {}
    while len(ends) < ranks - len(frozen) and time.monotonic() - began < LIMIT_S:
        for rank, script in enumerate(scripts):
            if rank not in ends and rank not in frozen and script.code() is not None:
                ends[rank] = time.monotonic() - began
        time.sleep(0.05)
    results: list[Said] = []
    for rank, script in enumerate(scripts):
        end = script.ended(timeout_s=0.1)
        lines = [line for line in end.out.splitlines() if line.startswith("{")]
        said = json.loads(lines[-1]) if lines else {}
        results.append(Said(end.code, said, end.err, ends.get(rank, LIMIT_S)))
    return results
