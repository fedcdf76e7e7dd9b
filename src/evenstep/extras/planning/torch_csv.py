"""Compute orders in the CSV form of `torch.distributed.pipelining`, to and fro.

One row per rank, one cell per action, as its `_dump_csv` writes and its `_load_csv` reads in the form `compute_only`.
Nothing of torch is needed. What the form holds besides computations (sends, unsharding, reductions) is left out.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence

from evenstep.errors import PlanError
from evenstep.pipeline.action import COMPUTES, Action, Plan

_OPS = {op.value: op for op in COMPUTES}
_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_WAITS = ("WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B")  # since torch 2.15
_LEFT_OUT = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B", *_WAITS)


def to_torch_csv(plans: Sequence[Plan]) -> str:
    """The computations of `plans`, for a schedule of `torch.distributed.pipelining` to load.

    >>> from evenstep.extras.planning.text import read_plans
    >>> to_torch_csv(read_plans("0F0 0SO0:1 0I0 0W0"))
    '0F0,0I0,0W0\\n'
    """
    return "".join(",".join(str(action) for action in plan if action.op in COMPUTES) + "\n" for plan in plans)


def from_torch_csv(text: str) -> tuple[Plan, ...]:
    """The computations in `text`, one plan per row. Idle cells are left out; overlapped pairs follow one another.

    >>> [str(action) for action in from_torch_csv("0F0,,0SEND_F0,0B0")[0]]
    ['0F0', '0B0']
    """
    return tuple(
        tuple(action for column, cell in enumerate(row, start=1) for action in _actions(cell.strip(), number, column))
        for number, row in enumerate(csv.reader(io.StringIO(text)), start=1)
    )


def _actions(cell: str, row: int, column: int) -> Iterator[Action]:
    overlapped = _OVERLAPPED.fullmatch(cell)
    for part in overlapped[1].split(";") if overlapped else [cell]:
        match = _CELL.fullmatch(part)
        if part and (match is None or match[2] not in (*_OPS, *_LEFT_OUT)):
            raise PlanError(f"row {row}, column {column}: `{cell}` is no action of torch's, such as 0F0 or 1SEND_F2.")
        if match is not None and match[2] in _OPS:
            yield Action(_OPS[match[2]], int(match[1]), int(match[3]))
