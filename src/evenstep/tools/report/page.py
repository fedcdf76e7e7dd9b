"""Writes the report of one or several runs as one HTML file that needs no network.

The template escapes everything from the run folders; only the files beside this one are trusted.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from evenstep.errors import EvenstepError
from evenstep.files import replacing
from evenstep.tools.report.charts import NUM_COLORS, Chart, Figures, charts, figures_of
from evenstep.tools.report.read import ReportedRun, read_run
from evenstep.version import __version__

_HERE = Path(__file__).parent
_TRUSTED = (
    "page.css",
    "page.js",
    "curves.js",
    "vendor/uPlot.min.css",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.LICENSE",
)
_MAX_TILES = 4


class Shown(NamedTuple):
    """A run on the page; `tiles` are label, number and notes."""

    number: int
    color: int
    name: str
    run: ReportedRun
    figures: Mapping[str, Figures]
    tiles: list[tuple[str, str, tuple[str, ...]]]


def write_report(folder: Path | str) -> Path:
    """Write `report.html` into a run folder, and return its path; it says which files are missing or broken."""
    return write_page([Path(folder)], Path(folder) / "report.html")


def write_page(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of the runs in `folders` to `path`, which is returned."""
    text = render([read_run(folder) for folder in folders]).encode("utf-8", "backslashreplace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as new:
            new.write_bytes(text)
    except OSError as error:
        raise EvenstepError(
            f"the report cannot be written to `{path}`: {error.strerror}; name another file by `--to FILE`."
        ) from error
    return path


def render(runs: Sequence[ReportedRun], *, live: bool = False) -> str:
    """The page of `runs`."""
    names = [run.name for run in runs]
    shown = [_shown(number, run, names) for number, run in enumerate(runs)]
    drawn = charts([(each.name, each.run.metrics) for each in shown])
    groups: dict[str, list[tuple[int, Chart]]] = {}
    for place, chart in enumerate(drawn):
        groups.setdefault(chart["group"], []).append((place, chart))
    listed: list[dict[str, Any]] = []
    for each in shown:
        incidents = [[one.update, f"{one.kind}: {one.message}"] for one in each.run.incidents[:1000]]
        listed.append({"name": each.name, "incidents": incidents})
    judged = list(dict.fromkeys(name for each in shown for name in judged_of(each.figures)))[:3]
    differences = between([run.settings for run in runs])
    return _template().render(
        title=shown[0].name if len(runs) == 1 else f"{len(runs)} runs",
        shown=shown,
        one=shown[0] if len(runs) == 1 else None,
        metrics=list(dict.fromkeys(name for each in shown for name in each.figures)),
        judged=judged,
        groups=groups,
        differences=differences,
        over_seeds=over_seeds(shown, differences, judged),
        max_incidents=100,
        open_charts=12,  # a group of more charts is closed at first
        data={"runs": listed, "charts": drawn, "live": live},
        live=live,
        written=datetime.now(UTC),
        version=__version__,
        files={path: Markup((_HERE / path).read_text(encoding="utf-8")) for path in _TRUSTED},
    )


def judged_of(figures: Mapping[str, Figures]) -> list[str]:
    """Metrics with a best value: of evaluations if there are any, as the best of one training batch is luck."""
    names = [name for name, one in figures.items() if one.best is not None]
    return [name for name in names if not name.startswith("train/")] or names


def between(settings: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Settings in which runs differ, each with its value in every run; "" where it is not set."""
    rows = {key: tuple(one.get(key, "") for one in settings) for one in settings for key in one}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def over_seeds(
    shown: Sequence[Shown], differences: Mapping[str, tuple[str, ...]], judged: Sequence[str]
) -> list[dict[str, list[str]]]:
    """Groups of runs with different seeds and otherwise equal settings: names, settings, spread of each metric."""
    keys = [key for key in differences if key != "seed"]
    groups: dict[tuple[str, ...], list[Shown]] = {}
    for each in shown if "seed" in differences else ():
        groups.setdefault(tuple(differences[key][each.number] for key in keys), []).append(each)
    return [
        {
            "names": [each.name for each in members],
            "settings": [f"{key} = {value or 'not set'}" for key, value in zip(keys, values, strict=True)],
            "results": [_spread([one.figures[name].best for one in members if name in one.figures]) for name in judged],
        }
        for values, members in groups.items()
        if len(members) > 1
    ]


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{spell_figure(mean(known))} ± {stdev(known):.2g}" if len(known) > 1 else "–"


def _shown(number: int, run: ReportedRun, names: Sequence[str]) -> Shown:
    name = run.name if names.count(run.name) == 1 else f"{run.folder.resolve().parent.name}/{run.name}"
    figures = figures_of(run.metrics)
    tiles: list[tuple[str, str, tuple[str, ...]]] = []
    status = run.status
    update = max(map(max, run.metrics.values()), default=None) if status.update is None else status.update
    if update is not None:
        planned = () if status.updates is None else (f"of {status.updates:,}",)
        tiles.append(("updates", f"{update:,}", planned))
    if status.started is not None and status.changed is not None:
        seconds = (status.changed - status.started).total_seconds()
        tiles.append(("duration", spell_duration(seconds), ("since its last start",)))
    for metric in judged_of(figures)[:_MAX_TILES]:
        one = figures[metric]
        notes = f"best, at update {one.best_update:,}", f"last {spell_figure(one.last)}"
        tiles.append((metric, spell_figure(one.best or 0.0), notes))
    return Shown(number, number % NUM_COLORS, name, run, figures, tiles)


def spell_figure(value: float, name: str = "") -> str:
    """Four significant digits, or a size if the metric counts bytes.

    >>> spell_figure(397_812_736.0, "perf/memory_peak_bytes"), spell_figure(21316.2)
    ('397.8 MB', '21,320')
    """
    if name.endswith("_bytes") and 0 <= value < 1e18:
        power = min(4, int(math.log10(max(value, 1)) / 3))
        return f"{value / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
    rounded = f"{value:.4g}"
    return f"{float(rounded):,.0f}" if 1e4 <= abs(value) < 1e9 else rounded


def spell_duration(seconds: float) -> str:
    """Duration in its largest units.

    >>> spell_duration(192), spell_duration(90_061)
    ('3 min 12 s', '25 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = environment.filters
    filters.update(figure=spell_figure, moment="{:%Y-%m-%d %H:%M UTC}".format, code=_code, count="{:,}".format)
    return environment.get_template("page.html")


def _code(text: str) -> Markup:
    """Text with its parts in backticks as code."""
    parts = enumerate(text.split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in parts)
