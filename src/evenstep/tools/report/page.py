"""Writes the report of one or several runs as one HTML file that needs no network.

The template escapes everything from the run folders; only the files beside this one are trusted.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evenstep.errors import EvenstepError
from evenstep.tools.report.charts import NUM_COLORS, Chart, charts
from evenstep.tools.report.figures import (
    MetricFigures,
    duration_s,
    metric_figures,
    spell_bytes,
    spell_duration,
    spell_figure,
    spell_number,
)
from evenstep.tools.report.run import ReportedRun, moment, number, read_run
from evenstep.tools.report.settings import Row, between, from_defaults
from evenstep.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

_HERE = Path(__file__).parent
_STATES = ("done", "running", "stopped", "failed")
_TRUSTED = {
    "page_css": "page.css",
    "curves_js": "curves.js",
    "page_js": "page.js",
    "plot_css": "vendor/uPlot.min.css",
    "plot_js": "vendor/uPlot.iife.min.js",
    "plot_license": "vendor/uPlot.LICENSE",
}
_MAX_METRIC_TILES = 4
_MAX_INCIDENTS = 100
_OPEN_CHARTS = 12  # a group of more charts is closed at first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    number: int
    run: ReportedRun
    state: str
    reason: str
    tiles: list[tuple[str, str, tuple[str, ...]]]
    figures: dict[str, MetricFigures]
    changed: list[Row] | None

    @property
    def color(self) -> int:
        return self.number % NUM_COLORS


def write_report(folder: Path | str) -> Path:
    """Write `report.html` into a run folder, from what is there, and return its path.

    A file that is missing or broken is said on the page.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = (Path(run) / "metrics.jsonl").write_text('{"update": 1, "train/loss": 2.5}')
    ...     write_report(run).name
    'report.html'
    """
    return write_page([Path(folder)], Path(folder) / "report.html")


def write_page(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of the runs in `folders` to `path`, which is returned."""
    text = render([read_run(folder) for folder in folders])
    half = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_special = path.exists() and not path.is_file()  # such as /dev/stdout, which no file must take the place of
        (path if is_special else half).write_text(text, encoding="utf-8", errors="backslashreplace")
        if not is_special:
            half.replace(path)
    except OSError as error:
        raise EvenstepError(
            f"the report cannot be written to `{path}`: {error.strerror}; make room there, make the folder writable, "
            f"or name another file, `evenstep report FOLDER --to FILE`."
        ) from error
    finally:  # also at Ctrl-C
        with suppress(OSError):
            half.unlink(missing_ok=True)
    return path


def render(runs: Sequence[ReportedRun], *, live: bool = False) -> str:
    """The page of `runs`."""
    names = _names(runs)
    drawn = charts([(name, run.metrics) for name, run in zip(names, runs, strict=True)])
    shown = [_shown(place, run) for place, run in enumerate(runs)]
    return _template().render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        names=names,
        shown=shown,
        one=shown[0] if len(runs) == 1 else None,
        metrics=list(dict.fromkeys(name for each in shown for name in each.figures)),
        judged=_judged(shown),
        groups=_groups(drawn),
        differences=between([run.config for run in runs]) if len(runs) > 1 else [],
        max_incidents=_MAX_INCIDENTS,
        open_charts=_OPEN_CHARTS,
        data=_data(names, shown, drawn, live=live),
        live=live,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        **{key: _trusted(path) for key, path in _TRUSTED.items()},
    )


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = environment.filters
    filters.update(number=spell_number, bytes=spell_bytes, figure=spell_figure, moment=_moment, code=_code)
    return environment.get_template("page.html")


def _shown(place: int, run: ReportedRun) -> _Shown:
    figures = metric_figures(run.metrics)
    return _Shown(
        number=place,
        run=run,
        state=_state(run),
        reason=_reason(run),
        tiles=_tiles(run, figures),
        figures={one.name: one for one in figures},
        changed=from_defaults(run.config, run.defaults),
    )


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    names = [run.name for run in runs]
    return [
        f"{run.folder.resolve().parent.name}/{name}" if names.count(name) > 1 else name
        for run, name in zip(runs, names, strict=True)
    ]


def _judged(shown: Sequence[_Shown]) -> list[str]:
    names = dict.fromkeys(name for each in shown for name, one in each.figures.items() if one.best is not None)
    evaluated = [name for name in names if not name.startswith("train/")]
    return (evaluated or list(names))[:3]


def _groups(drawn: Sequence[Chart]) -> list[tuple[str, list[tuple[int, Chart]]]]:
    groups: dict[str, list[tuple[int, Chart]]] = {}
    for place, chart in enumerate(drawn):
        groups.setdefault(chart.group, []).append((place, chart))
    return list(groups.items())


def _data(names: Sequence[str], shown: Sequence[_Shown], drawn: Sequence[Chart], *, live: bool) -> dict[str, Any]:
    runs = [
        {
            "name": name,
            "incidents": [[one.update, f"{one.kind}: {one.message}"] for one in each.run.incidents[:1000]],
        }
        for name, each in zip(names, shown, strict=True)
    ]
    return {"runs": runs, "charts": [asdict(chart) for chart in drawn], "live": live}


def _trusted(path: str) -> "Markup":
    from markupsafe import Markup

    return Markup((_HERE / path).read_text(encoding="utf-8"))


def _state(run: ReportedRun) -> str:
    told = run.status.get("state")
    return str(told) if told in _STATES else "unknown"


def _reason(run: ReportedRun) -> str:
    reason, changed = run.status.get("reason"), run.status.get("changed")
    if reason is None and isinstance(changed, str):
        return f"last heard of at {_moment(changed)}"
    return str(reason or "")


def _tiles(run: ReportedRun, figures: Sequence[MetricFigures]) -> list[tuple[str, str, tuple[str, ...]]]:
    tiles: list[tuple[str, str, tuple[str, ...]]] = []
    seen = max((max(values) for values in run.metrics.values()), default=None)
    update, planned = number(run.status.get("update")), number(run.status.get("updates"))
    if update is not None or seen is not None:
        of = (f"of {planned:,.0f}",) if planned is not None else ()
        tiles.append(("updates", f"{seen if update is None else update:,.0f}", of))
    seconds = duration_s(run)
    if seconds is not None:
        tiles.append(("duration", spell_duration(seconds), ("since its last start",)))
    judged = [figure for figure in figures if figure.best is not None]
    # the best of one training batch is luck; it stands on top only where nothing was evaluated
    evaluated = [figure for figure in judged if not figure.name.startswith("train/")]
    for figure in (evaluated or judged)[:_MAX_METRIC_TILES]:
        notes = f"best, at update {figure.best_update:,}", f"last {spell_number(figure.last)}"
        tiles.append((figure.name, spell_number(cast(float, figure.best)), notes))
    return tiles


def _moment(text: str) -> str:
    found = moment(text)
    return text if found is None else f"{found.astimezone(UTC):%Y-%m-%d %H:%M UTC}"


def _code(text: str) -> "Markup":
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(
        part if position % 2 == 0 else Markup("<code>{}</code>").format(part) for position, part in enumerate(parts)
    )
