"""`evenstep find-lr RUN.toml`: makes some updates of a run at ever larger learning rates, and suggests one.

It builds the run as `check` does, starts the ranks that it asks for, and throws all away: nothing is written.
"""

from pathlib import Path
from typing import Any

from evenstep.builders import open_run
from evenstep.cli.session import building, on_ranks
from evenstep.config.faults import refused_at
from evenstep.config.sources import settings_of
from evenstep.errors import ConfigError
from evenstep.parallel import Group
from evenstep.process import EXIT_DONE
from evenstep.train import FoundLr, find_lr
from evenstep.train.tryouts.lr_finder import check_range

_WIDTH = 40  # of the bars
_ROWS = 25


def run(path: str, settings: list[str], *, lowest: float, highest: float, tries: int) -> int:
    """Try learning rates; gives the exit code."""
    given: dict[str, Any] = {"lowest": lowest, "highest": highest, "updates": tries}
    with refused_at("evenstep find-lr"):
        check_range(**given)
    again = ["--lowest", str(lowest), "--highest", str(highest), "--tries", str(tries)]
    with open_run(Path(path), settings_of(settings)) as run:
        if run.config.parallel.pipeline > 1:
            raise ConfigError(["`parallel.pipeline` must be 1 for `evenstep find-lr`; add `--parallel none`."])

        def work(group: Group) -> int:
            with building(run, group) as session:
                found = find_lr(session.without_rewinds().trainer(), **given)
            if group.rank == 0:
                print("\n".join(described(found)), flush=True)
            return EXIT_DONE

        return on_ranks(run, ["find-lr", path, *again, *settings], work, restarts=False)


def described(found: FoundLr) -> list[str]:
    """The losses as lines with bars, some of them where there are many, and what to do.

    >>> print("\\n".join(described(FoundLr(rates=(0.1, 1.0), losses=(2.0, 1.0), suggestion=0.1))))
    learning rate        loss    smoothed
          1.0e-01           2           2  ########################################
          1.0e+00           1       1.474  #############################
    suggested   --optimizer.lr 1.0e-01: there the smoothed loss falls fastest
    """
    smoothed, last = found.smoothed, len(found.rates) - 1
    rows = sorted({round(number * last / (_ROWS - 1)) for number in range(_ROWS)}) if last >= _ROWS else range(last + 1)
    top = max(smoothed)
    lines = [f"{'learning rate':>13}{'loss':>12}{'smoothed':>12}"]
    for number in rows:
        bar = "#" * round(_WIDTH * max(smoothed[number], 0.0) / top) if top > 0 else ""
        lines.append(
            f"{found.rates[number]:>13.1e}{found.losses[number]:>12.4g}{smoothed[number]:>12.4g}  {bar}".rstrip()
        )
    if found.suggestion is None:
        said = "suggested   nothing: the loss never fell by more than it differs from one update to the next; try more "
        return [*lines, f"{said}(`--tries 100`), lower rates (`--lowest`), larger batches, or look at the task"]
    return [*lines, f"suggested   --optimizer.lr {found.suggestion:.1e}: there the smoothed loss falls fastest"]
