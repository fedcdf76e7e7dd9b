"""Writes the report of one or several runs as one HTML file that needs no network.

The template escapes everything from the run folders; only the files beside this one are trusted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.errors import EvenstepError
from evenstep.files import replacing
from evenstep.tools.report.charts import NUM_COLORS, Chart, charts
from evenstep.tools.report.figures import MetricFigures, metric_figures, spell_bytes, spell_duration, spell_figure
from evenstep.tools.report.run import ReportedRun, between, read_run
from evenstep.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

_HERE = Path(__file__).parent
_TRUSTED = {
    "page_css": "page.css",
    "curves_js": "curves.js",
    "page_js": "page.js",
    "plot_css": "vendor/uPlot.min.css",
    "plot_js": "vendor/uPlot.iife.min.js",
    "plot_license": "vendor/uPlot.LICENSE",
}
_MAX_TILES = 4
_MAX_INCIDENTS = 100
_OPEN_CHARTS = 12  # a group of more charts is closed at first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A run on the page."""

    number: int
    name: str
    run: ReportedRun
    figures: Mapping[str, MetricFigures]
    tiles: list[tuple[str, str, tuple[str, ...]]]

    @property
    def color(self) -> int:
        return self.number % NUM_COLORS

    @property
    def judged(self) -> list[str]:
        """Metrics with a best value: of evaluations if there are any, as the best of one training batch is luck."""
        names = [name for name, one in self.figures.items() if one.best is not None]
        return [name for name in names if not name.startswith("train/")] or names


def write_report(folder: Path | str) -> Path:
    """Write `report.html` into a run folder, and return its path.

    The page says which files are missing or broken.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = (Path(run) / "metrics.jsonl").write_text('{"update": 1, "train/loss": 2.5}')
    ...     write_report(run).name
    'report.html'
    """
    return write_page([Path(folder)], Path(folder) / "report.html")


def write_page(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of the runs in `folders` to `path`, which is returned."""
    text = render([read_run(folder) for folder in folders]).encode("utf-8", "backslashreplace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_bytes(text)
        else:
            with replacing(path, sync=False) as new:
                new.write_bytes(text)
    except OSError as error:
        raise EvenstepError(
            f"the report cannot be written to `{path}`: {error.strerror}; make room there, make the folder writable, "
            f"or name another file, `evenstep report FOLDER --to FILE`."
        ) from error
    return path


def render(runs: Sequence[ReportedRun], *, live: bool = False) -> str:
    """The page of `runs`."""
    names = [run.name for run in runs]
    shown = [_shown(number, run, names) for number, run in enumerate(runs)]
    drawn = charts([(each.name, each.run.metrics) for each in shown])
    groups: dict[str, list[tuple[int, Chart]]] = {}
    for place, chart in enumerate(drawn):
        groups.setdefault(chart.group, []).append((place, chart))
    incidents = [[[one.update, f"{one.kind}: {one.message}"] for one in run.incidents[:1000]] for run in runs]
    listed = [{"name": each.name, "incidents": told} for each, told in zip(shown, incidents, strict=True)]
    return _template().render(
        title=shown[0].name if len(runs) == 1 else f"{len(runs)} runs",
        shown=shown,
        one=shown[0] if len(runs) == 1 else None,
        metrics=list(dict.fromkeys(name for each in shown for name in each.figures)),
        judged=list(dict.fromkeys(name for each in shown for name in each.judged))[:3],
        groups=groups,
        differences=between([run.config for run in runs]) if len(runs) > 1 else [],
        max_incidents=_MAX_INCIDENTS,
        open_charts=_OPEN_CHARTS,
        data={"runs": listed, "charts": [asdict(chart) for chart in drawn], "live": live},
        live=live,
        written=datetime.now(UTC),
        version=__version__,
        **{key: _trusted(path) for key, path in _TRUSTED.items()},
    )


def _shown(number: int, run: ReportedRun, names: Sequence[str]) -> _Shown:
    name = run.name if names.count(run.name) == 1 else f"{run.folder.resolve().parent.name}/{run.name}"
    figures = {one.name: one for one in metric_figures(run.metrics)}
    shown = _Shown(number=number, name=name, run=run, figures=figures, tiles=[])
    status = run.status
    update = status.update
    if update is None:
        update = max((max(values) for values in run.metrics.values()), default=None)
    if update is not None:
        planned = () if status.updates is None else (f"of {status.updates:,}",)
        shown.tiles.append(("updates", f"{update:,}", planned))
    if status.started is not None and status.changed is not None:
        seconds = (status.changed - status.started).total_seconds()
        shown.tiles.append(("duration", spell_duration(seconds), ("since its last start",)))
    for one in (figures[name] for name in shown.judged[:_MAX_TILES]):
        notes = f"best, at update {one.best_update:,}", f"last {spell_figure(one.last)}"
        shown.tiles.append((one.name, spell_figure(one.best or 0.0), notes))
    return shown


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = environment.filters
    filters.update(bytes=spell_bytes, figure=spell_figure, moment=_moment, code=_code, count="{:,}".format)
    return environment.get_template("page.html")


def _trusted(path: str) -> "Markup":
    from markupsafe import Markup

    return Markup((_HERE / path).read_text(encoding="utf-8"))


def _moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M UTC}"


def _code(text: str) -> "Markup":
    """Text with its parts in backticks as code."""
    from markupsafe import Markup, escape

    parts = enumerate(text.split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in parts)
