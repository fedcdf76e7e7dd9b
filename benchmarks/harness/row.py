"""One measured figure: what was done, by whom, how long it took, and beside what.

Times are judged as processor time, so that what other processes do on the machine counts little; the same ratio by
the clock on the wall stands beside it. Every benchmark gives a list of rows, and writes them to results/NAME.json.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Args:
        case: the work that was done.
        contender: who did it.
        median: of the processor times, in `unit`.
        unit: of the median, such as "us/update".
        ratio: the median over rounds of the time divided by that of the reference in the same round.
        spread: the distance between the quartiles of those ratios.
        wall_ratio: the same as `ratio` by the clock on the wall.
        bound: what the ratio must not exceed; None for a figure given for information.
    """

    case: str
    contender: str
    median: float
    unit: str
    ratio: float
    spread: float
    wall_ratio: float
    bound: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the bound holds; None without one."""
        return None if self.bound is None else self.ratio <= self.bound

    @property
    def verdict(self) -> str:
        """The figure beside its bound, in words."""
        bound = "" if self.bound is None else f", bound {self.bound:.3f}"
        return f"{self.case}: {self.contender} {self.ratio:.3f} ×{bound}"


class Times(NamedTuple):
    """Seconds of one contender, by round.

    Args:
        cpu_s: of processor time.
        wall_s: by the clock on the wall, which also counts waiting, for a disk or for other processes.
    """

    cpu_s: list[float]
    wall_s: list[float]


def mean_of(one: Times, other: Times) -> Times:
    """The mean of two contenders in each round.

    >>> mean_of(Times([1.0], [2.0]), Times([2.0], [4.0]))
    Times(cpu_s=[1.5], wall_s=[3.0])
    """
    return Times(*([(a + b) / 2 for a, b in zip(*both, strict=True)] for both in zip(one, other, strict=True)))


def compared(
    case: str, contender: str, times: Times, reference: Times, *, unit: str, per_s: float, bound: float | None = None
) -> Row:
    """The row of `times` beside those of the reference in the same rounds.

    Args:
        case: the work.
        contender: who did it.
        times: of the contender.
        reference: what it is divided by.
        unit: of the median.
        per_s: what a second is in that unit.
        bound: of the ratio.

    >>> compared("sum", "numpy", Times([2, 4, 9], [3, 6, 9]), Times([2, 2, 3], [3, 3, 3]), unit="ms", per_s=1e3).ratio
    2.0
    """
    ratios = _ratios(times.cpu_s, reference.cpu_s)
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(
        case=case,
        contender=contender,
        median=statistics.median(times.cpu_s) * per_s,
        unit=unit,
        ratio=middle,
        spread=upper - lower,
        wall_ratio=statistics.median(_ratios(times.wall_s, reference.wall_s)),
        bound=bound,
    )


def counted(
    case: str, counts: Mapping[str, float], *, reference: str, unit: str, bounds: Mapping[str, float]
) -> list[Row]:
    """A row for each contender of what was counted, not timed: the same in every round.

    Args:
        case: the work, and what was counted.
        counts: by contender.
        reference: the contender whose count all are divided by.
        unit: of the counts.
        bounds: of the ratio, by contender; of others it is given for information.

    >>> counts = {"ddp": 8.0, "local": 2.0}
    >>> rows = counted("mlp: bytes", counts, reference="ddp", unit="B/update", bounds={"local": 0.5})
    >>> [(row.contender, row.ratio, row.ok) for row in rows]
    [('ddp', 1.0, None), ('local', 0.25, True)]
    """
    rows: list[Row] = []
    for name, count in counts.items():
        ratio = count / counts[reference]
        row = Row(case=case, contender=name, median=count, unit=unit, ratio=ratio, spread=0.0, wall_ratio=ratio)
        rows.append(replace(row, bound=bounds.get(name)))
    return rows


def _ratios(times: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(times, reference, strict=True)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as JSON, each with whether its bound holds; who reads meanwhile has the old ones or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps([asdict(row) | {"ok": row.ok} for row in rows], indent=1) + "\n")
    new.replace(path)


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote."""
    return [Row(**{name: value for name, value in row.items() if name != "ok"}) for row in json.loads(path.read_text())]


def table(rows: Sequence[Row]) -> str:
    """The rows as lines of text, a blank one between cases."""
    lines = [["case", "contender", "median", "unit", "ratio", "spread", "wall", "bound", "ok"]]
    for row in rows:
        numbers = ["" if one is None else f"{one:.3f}" for one in (row.ratio, row.spread, row.wall_ratio, row.bound)]
        ok = {None: "", True: "yes", False: "NO"}[row.ok]
        lines.append([row.case, row.contender, f"{row.median:.4g}", row.unit, *numbers, ok])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts: list[str] = []
    case = rows[0].case if rows else ""
    for cells in lines:
        if cells[0] not in (case, "case"):
            case = cells[0]
            texts.append("")
        texts.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return "\n".join(texts)
