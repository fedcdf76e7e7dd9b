"""What ranks send and how long an update takes where they step alone, beside ddp: two processes over gloo.

`ratio` is a contender's time per update divided by that of ddp in the same round, the median over rounds; bytes are
what a rank gives to collectives per update, of parameters or gradients and of all messages: metrics, agreement on stops
and saves, and the ends of streams among them. Each chunk is a whole number of periods. That ranks which step alone come
to other parameters than ddp is no fault, so those are compared only where plain SGD shares in each update.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from contenders.evenstep_ import Classify, train  # noqa: E402 - the folder of this script must be on the path first
from evenstep import Checkpointing, Engine, Task, Training  # noqa: E402
from evenstep.parallel import Ddp, Local, Ordered, Processes  # noqa: E402
from harness.ranks import bytes_rows, on_ranks, one_rank, over_ranks  # noqa: E402
from harness.rounds import Train, interleave  # noqa: E402
from harness.row import Row, compared, table, write_rows  # noqa: E402
from harness.work import Work, mlp, transformer  # noqa: E402

RESULTS = HERE / "results" / "local.json"
RANKS, PERIOD = 2, 64
DDP, ORDERED = "ddp", "ordered"
SETTINGS: dict[str, dict[str, Any]] = {
    "local, every update": {"every_updates": 1},
    "local, every 8": {"every_updates": 8},
    "local, every 64": {"every_updates": PERIOD},
    "DiLoCo, every 64": {"every_updates": PERIOD, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
    "streaming DiLoCo, every 64 in 4, 2 late": {
        "every_updates": PERIOD,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "nesterov": True,
        "fragments": 4,
        "overlap_updates": 2,
        "own_share": 0.5,
    },
}
# A share in every 64 updates costs bytes, and beside them only what ranks say to each other in any strategy.
MOST = {"local, every 8": 1 / 8, "local, every 64": 1 / PERIOD, "streaming DiLoCo, every 64 in 4, 2 late": 1 / PERIOD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case: what makes its work, and in how many rounds each contender runs a period."""

    work: Callable[..., Work]
    rounds: int


CASES = {"transformer": Case(work=transformer, rounds=3), "mlp": Case(work=mlp, rounds=8)}


def measure(case: Case, group: Processes) -> list[Row]:
    """Run one case on this rank; all ranks get the same rows."""
    whole = case.work()
    work = replace(whole, name=f"{whole.name}, {RANKS} ranks", batches=whole.batches[group.rank :: RANKS])
    contenders: dict[str, Train] = {
        DDP: _with(lambda: Ddp(group)),
        **{name: _with(partial(Local, Ddp(group), **settings)) for name, settings in SETTINGS.items()},
    }
    mine = interleave(contenders, work, chunk_updates=PERIOD, rounds=case.rounds, same_work=False)
    times = over_ranks(group.gather(mine))
    row = partial(compared, unit="us/update", per_s=1e6 / PERIOD)
    rows = [row(work.name, name, one, times[DDP]) for name, one in times.items()]
    return rows + bytes_rows(contenders, work, PERIOD, reference=DDP, tensors="tensors", bounds=MOST)


def _with(strategy: Callable[[], Any]) -> Train:
    def run(model: Any, feed: Any, work: Work) -> list[float]:
        nothing = Checkpointing(every_minutes=None, keep_last=0)  # each rank has a folder of its own here
        return train(model, feed, work, strategy=strategy(), checkpoint=nothing)

    return run


class Square(Task):
    """The squared distance to the label."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def beside_ordered(group: Processes) -> list[Row]:
    """How far ranks that share in each update end from ddp with ordered sums, with SGD and an outer rate of 1.

    Where no number is rounded, not at all: averaging parameters is then averaging gradients. In float32 it is rounding.
    """
    line = nn.Linear(1, 1).double()
    with torch.no_grad():
        line.weight.fill_(0.5)
        line.bias.fill_(0.25)
    numbers = torch.arange(24.0, dtype=torch.float64).view(6, 4, 1)
    exact = [(one.remainder(5) - 2, one.remainder(3)) for one in numbers]
    work = mlp()
    name = next(iter(SETTINGS))
    line_apart = _apart(group, line, Square(), exact, updates=6)
    mlp_apart = _apart(group, work.model, Classify(), work.batches, updates=PERIOD)
    shown = [
        ("where nothing is rounded, 6 updates", line_apart, 0.0),
        (f"{work.name}, {PERIOD} updates", mlp_apart, None),
    ]
    return [
        Row(
            case=f"SGD, {case}, {RANKS} ranks: largest distance of a parameter to ddp ordered",
            contender=name,
            median=far,
            unit="",
            ratio=far,
            spread=0.0,
            wall_ratio=far,
            bound=bound,
        )
        for case, far, bound in shown
    ]


def _apart(group: Processes, model: nn.Module, task: Task, batches: Sequence[Any], *, updates: int) -> float:
    ends: list[list[Tensor]] = []
    for strategy in (Ordered(group), Local(Ordered(group), **next(iter(SETTINGS.values())))):
        mine = deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=1 / 16)
        engine = Engine(mine, task, optimizer, strategy=strategy, device="cpu", train=Training(check_loss=False))
        for update in range(updates):
            engine.update(batches[(RANKS * update + group.rank) % len(batches)])
        ends.append([one.detach() for one in mine.parameters()])
    return max(float((one - other).abs().max()) for one, other in zip(*ends, strict=True))


def main() -> list[Row]:
    """Run all cases, print the table and write results/local.json."""
    rows: list[Row] = []
    for name in CASES:
        print(f"{name} on {RANKS} ranks …", flush=True)
        rows += on_ranks(HERE / "local.py", ["--case", name], ranks=RANKS)
    rows += on_ranks(HERE / "local.py", ["--case", ORDERED], ranks=RANKS)
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


def _measured(group: Processes, arguments: argparse.Namespace) -> list[Row]:
    if arguments.case == ORDERED:
        return beside_ordered(group)
    case = CASES[arguments.case]
    return measure(case if arguments.rounds is None else replace(case, rounds=arguments.rounds), group)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure one case on one rank; see benchmarks/run.py for all.")
    parser.add_argument("--case", choices=[*CASES, ORDERED], required=True)
    parser.add_argument("--rounds", type=int, help="fewer rounds than the case has, to try it")
    one_rank(parser, _measured)
