"""What ordered sums cost beside fast ones and beside torch's DDP tuned by hand: two processes over gloo, in one run.

`ratio` is a contender's time per update divided by that of the loop by hand in the same round, the median over rounds;
`spread` is the distance between the quartiles. Two copies of that loop tell the noise of the run: their mean is the
reference. Times are processor time, the mean of both ranks; `wall` is the same ratio by the clock, of the slower rank.
With ddp, bytes that are given to collectives are counted, too. Each rank runs four micro-batches, so ordered sums hold
up to two more sets of gradients (log₂ 4) than fast ones. Shards take no fused optimizer on a CPU, so they are a case of
their own, beside fast ones.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from contenders import by_hand_ddp, evenstep_  # noqa: E402 - the folder of this script must be on the path first
from evenstep.parallel import Ddp, Fsdp, Processes, Strategy, Zero1  # noqa: E402
from harness.ranks import bytes_rows, on_ranks, one_rank, over_ranks  # noqa: E402
from harness.rounds import Train, chunk_of, interleave  # noqa: E402
from harness.row import Row, compared, mean_of, table, write_rows  # noqa: E402
from harness.work import Work, transformer  # noqa: E402

RESULTS = HERE / "results" / "ordered.json"
TUNED, AGAIN = "DDP tuned by hand", "DDP tuned by hand, again"
STRATEGIES: dict[str, Callable[[Processes], Strategy]] = {
    "ddp, fast": partial(Ddp, reduction="fast"),
    "ddp, ordered": Ddp,
    "zero1, ordered": Zero1,
}
RANKS = 2
NUM_MICROBATCHES = 4
ROUNDS = 30
CHUNK_S = 0.03  # and two updates at least, so that a run records its loss, which is read once in 50
COUNTED_UPDATES = 2
BOUND = 1.03  # of ddp, ordered, to which half the noise is added


def measure(group: Processes, rounds: int) -> list[Row]:
    """Run all contenders on this rank; all ranks get the same rows."""
    whole = transformer(num_microbatches=NUM_MICROBATCHES)
    work = replace(whole, name=f"{whole.name}, {RANKS} ranks", batches=whole.batches[group.rank :: RANKS])
    contenders: dict[str, Train] = {TUNED: by_hand_ddp.train, AGAIN: by_hand_ddp.train}
    for name, strategy in STRATEGIES.items():
        contenders[name] = partial(_train, strategy=strategy(group))
    chunk = group.gather(chunk_of(contenders[TUNED], work, seconds=CHUNK_S, multiple=2))[0]
    times = over_ranks(group.gather(interleave(contenders, work, chunk_updates=chunk, rounds=rounds)))
    row = partial(compared, unit="us/update", per_s=1e6 / chunk)
    reference = mean_of(times[TUNED], times[AGAIN])
    bounds = {"ddp, ordered": BOUND + row("", "", times[AGAIN], times[TUNED]).spread / 2}
    rows = [row(work.name, name, one, reference, bound=bounds.get(name)) for name, one in times.items()]
    counted = {name: contenders[name] for name in (TUNED, "ddp, fast", "ddp, ordered")}
    rows += _shards(group, replace(work, name=f"{work.name}, shards", fused=False), rounds)
    return rows + bytes_rows(
        counted, work, COUNTED_UPDATES, reference=TUNED, tensors="gradients", bounds={"ddp, ordered": 1.02}
    )


def _shards(group: Processes, work: Work, rounds: int) -> list[Row]:
    kinds: dict[str, Callable[[Processes], Strategy]] = {
        "fsdp, fast": partial(Fsdp, reduction="fast"),
        "fsdp, fast, again": partial(Fsdp, reduction="fast"),
        "fsdp, ordered": Fsdp,
    }
    contenders: dict[str, Train] = {name: partial(_train, strategy=strategy(group)) for name, strategy in kinds.items()}
    chunk = group.gather(chunk_of(contenders["fsdp, fast"], work, seconds=CHUNK_S, multiple=2))[0]
    times = over_ranks(group.gather(interleave(contenders, work, chunk_updates=chunk, rounds=rounds)))
    reference = mean_of(times["fsdp, fast"], times["fsdp, fast, again"])
    row = partial(compared, unit="us/update", per_s=1e6 / chunk)
    return [row(work.name, name, one, reference) for name, one in times.items()]


def _train(model: Any, feed: Any, work: Work, *, strategy: Strategy) -> list[float]:
    return evenstep_.train(model, feed, work, strategy=strategy)


def main() -> list[Row]:
    """Run all contenders, print the table and write results/ordered.json."""
    rows = on_ranks(HERE / "ordered.py", ["--rounds", str(ROUNDS)], ranks=RANKS)
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure on one rank; see benchmarks/run.py for all.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer rounds, to try it")
    one_rank(parser, lambda group, arguments: measure(group, arguments.rounds))
