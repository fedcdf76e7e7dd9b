"""Runs the benchmarks, all of them or one, and exits 1 if any bound does not hold.

    make bench                     all
    make bench NAME=overhead       benchmarks/overhead.py alone

A benchmark is a file in this folder with a `main()` that measures, prints its table, writes results/NAME.json (a list
of `{case, contender, median, unit, ratio, spread, bound, ok}`) and gives the rows.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import cast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from harness.row import Row  # noqa: E402 - the folder of this script must be on the path first

NOT_BENCHMARKS = {"peers", "run"}


def names(folder: Path) -> list[str]:
    """The benchmarks of `folder`."""
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def choose(name: str | None, available: list[str]) -> list[str]:
    """The benchmarks to run: the one called `name`, or all.

    Raises:
        ValueError: there is none of this name.
    """
    if not name:
        return available
    if name in available:
        return [name]
    close = get_close_matches(name, available, n=1)
    meant = f" Did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"there is no benchmark '{name}'; there are: {', '.join(available)}.{meant}")


def run(benchmarks: list[str]) -> int:
    """Run them one after the other; 0 if every bound holds, else 1."""
    failed: list[str] = []
    for name in benchmarks:
        main = cast("Callable[[], list[Row]]", importlib.import_module(name).main)
        failed += [f"{name}: {row.verdict}" for row in main() if row.ok is False]
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks, all of them or one.")
    parser.add_argument("name", nargs="?", help="one of the files of this folder, without .py; all if left out")
    try:
        chosen = choose(parser.parse_args().name, names(HERE))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
