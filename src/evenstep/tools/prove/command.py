"""`evenstep prove RUN.toml`: tests that the run is the same however it is cut, shared, stopped and resumed.

The run is reduced to minutes on a CPU and made again for each row (see `rows`).
"""

import json as json_module
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from evenstep.config.load import from_arguments
from evenstep.errors import ConfigError, EvenstepError
from evenstep.process import EXIT_DONE, EXIT_ERROR
from evenstep.tools.prove.bench import RunFileBench
from evenstep.tools.prove.rows import Prover, Verdict
from evenstep.version import __version__

_WORDS = {True: ("holds", "green"), False: ("FAILS", "bold red"), None: ("-", "dim")}


def run(path: Path, settings: list[str], *, rows: str, updates: int, ranks: int, json: Path | None) -> int:
    """Print a table, write it as JSON; the exit code is 1 if a row fails."""
    bench = RunFileBench(path, from_arguments(settings), {})
    config = bench.config
    bench.fit_tokens()  # raises once, and not in each row, if the run can't be built
    prover = Prover(
        open=bench.open,
        elsewhere=bench.elsewhere,
        updates=min(updates, config.train.updates or updates),
        ranks=ranks,
        checks_loss=config.train.check_loss,
        workers=min(2, max(table.num_workers for table in config.sets.values())),
    )
    every = prover.rows()
    wanted = [text.strip() for text in rows.split(",")]
    chosen = {name: row for name, row in every.items() if any(text in name for text in wanted)}
    if not chosen:
        raise ConfigError(f"`--rows`: no row contains `{rows}`; there are {', '.join(every)}.")
    console = Console(highlight=False, soft_wrap=False)
    width = max(map(len, chosen))
    console.print(f"{'row':<{width}}  {'':<5}  {'difference':>10}  {'bound':>10}  {'s':>5}  compared", style="bold")
    threads = torch.get_num_threads()
    found: list[dict[str, object]] = []
    for name, row in chosen.items():
        start = time.perf_counter()
        verdict = row()
        seconds = time.perf_counter() - start
        _print_row(console, name.ljust(width), verdict, seconds)
        found.append({"row": name, **asdict(verdict), "seconds": round(seconds, 2)})
    torch.set_num_threads(threads)
    failed = [str(row["row"]) for row in found if row["holds"] is False]
    held = sum(row["holds"] is True for row in found)
    summary = f"{held} rows hold, {len(found) - held - len(failed)} not for this run, "
    summary += f"{len(failed)} fail: {', '.join(failed)}" if failed else "none fails"
    console.print(summary, style="bold red" if failed else "bold green")
    if json is not None:
        made = {"run": str(path), "updates": prover.updates, "holds": not failed, "evenstep": __version__}
        text = json_module.dumps({**made, "torch": torch.__version__, "rows": found}, indent=1) + "\n"
        try:
            json.parent.mkdir(parents=True, exist_ok=True)
            json.write_text(text, encoding="utf-8")
        except OSError as error:
            raise EvenstepError(f"{json} can't be written: {error.strerror}; give `--json` another file.") from error
    return EXIT_ERROR if failed else EXIT_DONE


def _print_row(console: Console, name: str, verdict: Verdict, seconds: float) -> None:
    word, style = _WORDS[verdict.holds]
    line = Text(f"{name}  ").append(f"{word:<5}", style=style)
    line.append(f"  {_short(verdict.value):>10}  {_short(verdict.bound):>10}  {seconds:>5.1f}  {verdict.measure}")
    console.print(line)
    for text, color in [(verdict.note, "dim"), *((cause, "red") for cause in verdict.causes)]:
        if text:
            console.print(Padding(Text(text, style=color), (0, 0, 0, len(name) + 2), expand=False))


def _short(value: float | str) -> str:
    return value[:10] if isinstance(value, str) else f"{value:.2g}"
