"""How long an import takes, in processes that do nothing else."""

import os
import subprocess
import sys
from collections.abc import Sequence

from harness.row import Times

_SCRIPT = """
from time import perf_counter, process_time
cpu, wall = process_time(), perf_counter()
{}
print(process_time() - cpu, perf_counter() - wall)
"""


def import_times(statements: Sequence[str], *, rounds: int) -> dict[str, Times]:
    """How long each import statement takes in each round; each runs once before, to fill the disk's cache.

    That also writes the compiled modules, which an installed package has, also where the environment says not to.

    >>> sorted(import_times(["import json", "import csv"], rounds=2))
    ['import csv', 'import json']
    """
    times = {statement: Times([], []) for statement in statements}
    for number in range(rounds + 1):
        first = number % len(statements)
        for statement in [*statements[first:], *statements[:first]]:
            command = [sys.executable, "-c", _SCRIPT.format(statement)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            for column, seconds in zip(times[statement], map(float, done.stdout.split()), strict=True):
                column.append(seconds)
    return {statement: Times(one.cpu_s[1:], one.wall_s[1:]) for statement, one in times.items()}
