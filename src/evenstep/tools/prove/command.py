"""`evenstep prove RUN.toml`: a certificate that the run is the same however it is cut, shared, stopped and resumed.

The run is shrunk to minutes on a CPU and made again for each row: cut in 1, 2 and 4 micro-batches and unevenly, in its
own number format and in float64, on several ranks, in stages, stopped, killed and resumed, and as a plain loop of
PyTorch. A row that fails names what makes it fail. Rows are those of `rows`; what makes a run file a bench for
them is in `prove_bench`, and what runs one of them in processes of its own in `prove_part`.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from evenstep.builders import open_run
from evenstep.config.sources import settings_of
from evenstep.config.tasks import data_tables
from evenstep.errors import ConfigError, EvenstepError
from evenstep.process import EXIT_DONE, EXIT_ERROR
from evenstep.tools.prove.bench import RunFileBench
from evenstep.tools.prove.part import Elsewhere, run_part
from evenstep.tools.prove.rows import Prover, Verdict
from evenstep.tools.prove.subject import Bench, Variant
from evenstep.version import __version__

_IN_PROCESS = 20  # runs that the rows of one process make, about
_START_S = 6.0  # that a process starts in


def run(
    path: str,
    settings: list[str],
    *,
    rows: str,
    updates: int,
    ranks: int,
    json: Path | None,
    part: Path | None,
) -> int:
    """Prove it."""
    if part is not None:
        return run_part(Path(path), settings, part)
    given = settings_of(settings)
    with open_run(Path(path), given) as opened:
        config = opened.config
    source = RunFileBench(Path(path), given, {})
    uncut = source.fit_tokens()
    with source.open(Variant(cut="1")):
        pass  # what keeps the run from being built is said once, and not by each row
    bench = Bench(
        open=source.open,
        elsewhere=Elsewhere(Path(path), settings, source.tokens),
        updates=min(updates, config.train.updates or updates),
        ranks=ranks,
        precision=config.train.precision,
        own_strategy=config.parallel.strategy,
        layered=source.layered(),
        checks_loss=config.train.check_loss,
        uncut=uncut,
        workers=min(2, max(table.num_workers for table in data_tables(config).values())),
        seed=config.seed,
    )
    every = Prover(bench).rows()
    wanted = [part.strip() for part in rows.split(",")]
    chosen = {name: row for name, row in every.items() if any(part in name for part in wanted)}
    if not chosen:
        raise ConfigError([f"no row contains `{rows}`; there are {', '.join(every)}."])
    threads = torch.get_num_threads()
    try:
        found = _prove(chosen, f"{config.name}, {bench.updates} updates")
    finally:
        torch.set_num_threads(threads)
    holds = all(verdict.holds is not False for _, verdict, _ in found)
    if json is not None:
        _write(json, config.name, bench.updates, found, holds=holds)
    return EXIT_DONE if holds else EXIT_ERROR


def _prove(rows: Mapping[str, Callable[[], Verdict]], what: str) -> list[tuple[str, Verdict, float]]:
    console = Console(highlight=False, soft_wrap=False)
    width = max(map(len, rows))
    console.print(
        Text(f"{'row':<{width}}  {'':<5}  {'difference':>10}  {'bound':>10}  {'s':>5}  compared", style="bold")
    )
    found: list[tuple[str, Verdict, float]] = []
    began = time.perf_counter()
    for name, row in rows.items():
        start = time.perf_counter()
        verdict, seconds = row(), time.perf_counter() - start
        found.append((name, verdict, seconds))
        for line in _lines(name, verdict, seconds, width):
            console.print(line)
        if name == "loss" and verdict.holds is not None and len(rows) > 1:
            console.print(
                Text(f"{'':<{width}}  all of it takes about {_spelled(_expected(rows, seconds))}", style="dim")
            )
    held = sum(verdict.holds is True for _, verdict, _ in found)
    failed = [name for name, verdict, _ in found if verdict.holds is False]
    not_had = sum(verdict.holds is None for _, verdict, _ in found)
    said = f"{what}: {held} rows hold" + (f", {not_had} not for this run" if not_had else "")
    said += f", {len(failed)} fail: {', '.join(failed)}" if failed else ", none fails"
    console.print(
        Text(f"{said}; {_spelled(time.perf_counter() - began)}", style="bold red" if failed else "bold green")
    )
    return found


def _expected(rows: Iterable[str], seconds: float) -> float:
    processes = sum(1 + (name == "kill") for name in rows if name.startswith(("ranks", "stages", "kill")))
    return seconds * _IN_PROCESS + processes * (_START_S + 2 * seconds)


def _spelled(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _lines(name: str, verdict: Verdict, seconds: float, width: int) -> list[Text | Padding]:
    word, style = {True: ("holds", "green"), False: ("FAILS", "bold red"), None: ("-", "dim")}[verdict.holds]
    shown = [_shown(one) for one in (verdict.value, verdict.bound)]
    line = Text(f"{name:<{width}}  ")
    line.append(f"{word:<5}", style=style)
    line.append(f"  {shown[0]:>10}  {shown[1]:>10}  {seconds:>5.1f}  {verdict.measure}")
    below = [(verdict.note, "dim"), *((cause, "red") for cause in verdict.causes)]
    return [
        line,
        *(Padding(Text(said, style=style), (0, 0, 0, width + 2), expand=False) for said, style in below if said),
    ]


def _shown(value: float | str) -> str:
    return f"{value[:10]}" if isinstance(value, str) else f"{value:.2g}"


def _write(path: Path, name: str, updates: int, found: Sequence[tuple[str, Verdict, float]], *, holds: bool) -> None:
    rows = [
        {
            "row": row,
            "measure": verdict.measure,
            "value": _plain(verdict.value),
            "bound": _plain(verdict.bound),
            "holds": verdict.holds,
            "note": verdict.note,
            "causes": list(verdict.causes),
            "seconds": round(seconds, 2),
        }
        for row, verdict, seconds in found
    ]
    made = {
        "run": name,
        "updates": updates,
        "holds": holds,
        "evenstep": __version__,
        "torch": torch.__version__,
        "rows": rows,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvenstepError(f"{path} can't be written: {error.strerror}; give `--json` another file.") from error


def _plain(value: float | str) -> float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
