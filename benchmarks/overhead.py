"""What a trainer costs: the same work in plain loops, in evenstep and in other trainers, interleaved in one process.

`ratio` is a contender's time divided by that of the loop tuned by hand in the same round, the median over rounds;
`spread` is the distance between the quartiles. There are two copies of that loop: their mean is what others are
divided by, and the spread of one against the other tells the noise of the run. Times are processor time of one thread,
so that other processes on the machine count little; `wall` is the same ratio by the clock on the wall. Every contender
starts from the same parameters, takes the same ready-made batches, and must end at the same parameters within 1e-5,
compiled or not; nothing may be compiled while it is timed.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first

import peers  # noqa: E402
from harness.imports import import_times  # noqa: E402
from harness.rounds import Train, chunk_of, interleave  # noqa: E402
from harness.row import Row, Times, compared, mean_of, read_rows, table, write_rows  # noqa: E402
from harness.work import Work, mlp, transformer, vit  # noqa: E402

RESULTS = HERE / "results" / "overhead.json"
TUNED, AGAIN, ORDINARY, EVENSTEP = "tuned by hand", "tuned by hand, again", "as people write it", "evenstep"
COMPILED, WHOLE = "evenstep, compiled model", "evenstep, compiled update"
CHUNK_S = 0.03
IMPORT_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case.

    Args:
        work: makes it.
        unit: of the times.
        rounds: how often each contender runs a chunk.
        multiple: of how many updates a chunk is; where updates are short, of those between two readings of the loss.
        bound: of evenstep's ratio to the tuned loop.
        noise: whether half the spread of that loop against itself, how far its two copies typically are apart in a
            round, is added to the bound.
        below_ordinary: the bound of its ratio to the ordinary loop; None for none.
        compiled: how evenstep takes part compiled as well, and the bound of each ratio; None for none.
    """

    work: Callable[[], Work]
    unit: str = "us/update"
    rounds: int
    multiple: int
    bound: float
    noise: bool = False
    below_ordinary: float | None = None
    compiled: Mapping[str, float | None] = field(default_factory=dict[str, float | None])


CASES = {
    "mlp": Case(
        work=mlp, rounds=90, multiple=50, bound=1.05, below_ordinary=0.80, compiled={COMPILED: None, WHOLE: 0.55}
    ),
    "accumulation": Case(
        work=partial(mlp, num_microbatches=4), unit="us/microbatch", rounds=40, multiple=50, bound=1.05
    ),
    "transformer": Case(
        work=transformer, rounds=50, multiple=1, bound=1.00, noise=True, compiled={COMPILED: 1.00, WHOLE: 0.95}
    ),
    "vit": Case(work=vit, rounds=50, multiple=1, bound=1.02),
}


def measure(case: Case, alone: str = "") -> list[Row]:
    """Run one case with everybody who is installed and needs no process of its own, or with one who does.

    Args:
        case: what is done.
        alone: who takes part beside the tuned loop; see `apart`.
    """
    torch.set_num_threads(1)
    work, tuned = case.work(), _train("bare", "train_tuned")
    contenders = {TUNED: tuned, AGAIN: tuned}
    if alone:
        contenders |= {name: train() for name, train in apart(case).items() if name == alone}
    else:
        contenders |= {ORDINARY: _train("bare", "train_ordinary"), EVENSTEP: _train("evenstep_", "train")}
        contenders |= {_named(peer): _train(peer.contender, "train") for peer in _installed(alone=False)}
    chunk_updates = chunk_of(tuned, work, seconds=CHUNK_S, multiple=case.multiple)
    times = interleave(contenders, work, chunk_updates=chunk_updates, rounds=case.rounds)
    rows = compare(case, work.name, times, microbatches=chunk_updates * work.num_microbatches)
    return [row for row in rows if row.contender not in (TUNED, AGAIN)] if alone else rows


def apart(case: Case) -> dict[str, Callable[[], Train]]:
    """Who takes part in a process of its own: some peers, and evenstep where it compiles.

    A process has one torch generator. Two runs of evenstep that take turns in the midst of an item of their streams see
    each other's draws as the stream's, and keep what it does to the generator apart from then on, which costs 0.2 ms.
    """
    functions = {COMPILED: "train_compiled", WHOLE: "train_compiled_update"}
    ours = {name: partial(_train, "evenstep_", functions[name]) for name in case.compiled}
    return ours | {_named(peer): partial(_train, peer.contender, "train") for peer in _installed(alone=True)}


def _installed(*, alone: bool) -> list[peers.Peer]:
    wanted = [peer for peer in peers.PEERS if peer.alone is alone]
    for peer in wanted:
        if find_spec(peer.module) is None:
            print(f"{peer.package} is not installed: skipped", flush=True)
    return [peer for peer in wanted if find_spec(peer.module) is not None]


def _named(peer: peers.Peer) -> str:
    return f"{peer.package} {version(peer.package)}"


def _train(module: str, function: str) -> Train:
    return getattr(importlib.import_module(f"contenders.{module}"), function)


def compare(case: Case, name: str, times: Mapping[str, Times], *, microbatches: int) -> list[Row]:
    """The rows of one process.

    Args:
        case: with the bounds.
        name: of the case, for people.
        times: of the chunks, by contender.
        microbatches: of a chunk.
    """
    reference = mean_of(times[TUNED], times[AGAIN])
    row = partial(compared, unit=case.unit, per_s=1e6 / microbatches)
    noise = row("", "", times[AGAIN], times[TUNED]).spread
    bounds = {EVENSTEP: case.bound + (noise / 2 if case.noise else 0), **case.compiled}
    rows = [row(name, contender, one, reference, bound=bounds.get(contender)) for contender, one in times.items()]
    if case.below_ordinary is not None and EVENSTEP in times:
        beside = f"{name}, beside the loop {ORDINARY}"
        rows.append(row(beside, EVENSTEP, times[EVENSTEP], times[ORDINARY], bound=case.below_ordinary))
    return rows


def measure_imports() -> list[Row]:
    """evenstep beside torch, in fresh processes, in turn; with `*` every public name is resolved."""
    torch_only, ours = "import torch", ["import evenstep", "from evenstep import *"]
    times = import_times([torch_only, *ours], rounds=IMPORT_ROUNDS)
    bounds = dict.fromkeys(ours, 1.15)
    row = partial(compared, "import", reference=times[torch_only], unit="ms", per_s=1e3)
    return [row(statement, one, bound=bounds.get(statement)) for statement, one in times.items()]


def main() -> list[Row]:
    """Run all cases, print the table and write results/overhead.json."""
    python = peers.python()
    rows: list[Row] = []
    for name in CASES:
        print(f"{name} …", flush=True)
        rows += sorted(_in_process(python, name), key=lambda row: row.case)  # those beside the ordinary loop go last
    print("import …", flush=True)
    rows += measure_imports()
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


def _in_process(python: Path, name: str) -> list[Row]:
    """Measure a case in processes of its own: one for most, then one for each who needs it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [str(python), str(Path(__file__).resolve()), "--case", name, "--out", str(out)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return read_rows(out)


def _one_case() -> None:
    parser = argparse.ArgumentParser(description="Measure one case; see benchmarks/run.py for all.")
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alone", default="", help="who takes part beside the tuned loop, instead of all others")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    rows = measure(case, arguments.alone)
    if not arguments.alone:
        for name in apart(case):
            subprocess.run([sys.executable, *sys.argv, "--alone", name], check=True)
            rows += read_rows(arguments.out)
    write_rows(arguments.out, rows)


if __name__ == "__main__":
    _one_case()
