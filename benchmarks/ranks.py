"""What a trainer costs on several ranks: two processes over gloo, four micro-batches each, interleaved in one run.

`ratio` is a contender's time per update divided by that of torch's DDP in a loop tuned by hand with a correct
`no_sync`, in the same round, the median over rounds; `spread` is the distance between the quartiles. There are two
copies of that loop: their mean is what others are divided by, and the spread of one against the other tells the noise
of the run. Times are processor time, the mean of both ranks; `wall` is the same ratio by the clock on the wall, of the
slower rank. All must end at the same parameters within 1e-5. What each gives to collectives per update is counted too.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import peers  # noqa: E402 - the folder of this script must be on the path first
from evenstep.parallel import Ddp, Processes  # noqa: E402
from harness.ranks import bytes_rows, on_ranks, one_rank, over_ranks  # noqa: E402
from harness.rounds import Train, chunk_of, interleave  # noqa: E402
from harness.row import Row, compared, mean_of, table, write_rows  # noqa: E402
from harness.work import Work, mlp, transformer  # noqa: E402

RESULTS = HERE / "results" / "ranks.json"
TUNED, AGAIN, EVENSTEP = "DDP tuned by hand", "DDP tuned by hand, again", "evenstep"
PEERS = {"lightning": "lightning_", "accelerate": "accelerate_"}
RANKS = 2
NUM_MICROBATCHES = 4
CHUNK_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case.

    Args:
        work: makes it, with `num_microbatches` per rank.
        rounds: how often each contender runs a chunk.
        multiple: of how many updates a chunk is.
        counted_updates: over how many updates bytes are counted.
        bound: of evenstep's ratio to the loop by hand, to which half the spread of that loop against itself is added:
            how far its two copies typically are apart in a round. None where messages outweigh the work.
    """

    work: Callable[..., Work]
    rounds: int
    multiple: int
    counted_updates: int
    bound: float | None


CASES = {
    "transformer": Case(work=transformer, rounds=40, multiple=1, counted_updates=2, bound=1.02),
    # An update of 2 ms: shows what messages cost, of which ranks that agree before they act send more.
    "mlp": Case(work=mlp, rounds=40, multiple=50, counted_updates=50, bound=None),
}


def measure(case: Case, group: Processes) -> list[Row]:
    """Run one case with everybody who is installed, on this rank; all ranks get the same rows."""
    whole = case.work(num_microbatches=NUM_MICROBATCHES)
    work = replace(whole, name=f"{whole.name}, {RANKS} ranks", batches=whole.batches[group.rank :: RANKS])
    contenders = _contenders(group)
    chunk = chunk_of(contenders[TUNED], work, seconds=CHUNK_S, multiple=case.multiple)
    chunk = group.gather(chunk)[0]
    mine = interleave(contenders, work, chunk_updates=chunk, rounds=case.rounds)
    times = over_ranks(group.gather(mine))
    row = partial(compared, unit="us/update", per_s=1e6 / chunk)
    reference = mean_of(times[TUNED], times[AGAIN])
    noise = row("", "", times[AGAIN], times[TUNED]).spread
    bounds = {} if case.bound is None else {EVENSTEP: case.bound + noise / 2}
    rows = [row(work.name, name, one, reference, bound=bounds.get(name)) for name, one in times.items()]
    del contenders[AGAIN]
    return rows + bytes_rows(
        contenders, work, case.counted_updates, reference=TUNED, tensors="gradients", bounds={EVENSTEP: 1.02}
    )


def _contenders(group: Processes) -> dict[str, Train]:
    def train(module: str, **more: Any) -> Train:
        return partial(importlib.import_module(f"contenders.{module}").train, **more)

    def evenstep(model: Any, feed: Any, work: Work) -> list[float]:
        return train("evenstep_", strategy=Ddp(group))(model, feed, work)

    contenders: dict[str, Train] = {TUNED: train("by_hand_ddp"), AGAIN: train("by_hand_ddp"), EVENSTEP: evenstep}
    for package, module in PEERS.items():
        if find_spec(package) is None:
            if group.rank == 0:
                print(f"{package} is not installed: skipped", flush=True)
        else:
            more = {"ranks": group.ranks} if package == "lightning" else {}
            contenders[f"{package} {version(package)}"] = train(module, **more)
    return contenders


def main() -> list[Row]:
    """Run all cases, print the table and write results/ranks.json."""
    python = peers.python()
    rows: list[Row] = []
    for name in CASES:
        print(f"{name} on {RANKS} ranks …", flush=True)
        rows += on_ranks(HERE / "ranks.py", ["--case", name], ranks=RANKS, python=python)
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


def _measured(group: Processes, arguments: argparse.Namespace) -> list[Row]:
    case = CASES[arguments.case]
    return measure(case if arguments.rounds is None else replace(case, rounds=arguments.rounds), group)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure one case on one rank; see benchmarks/run.py for all.")
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rounds", type=int, help="fewer rounds than the case has, to try it")
    one_rank(parser, _measured)
