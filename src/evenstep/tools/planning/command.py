"""`evenstep plan [RUN.toml]`: compares pipeline schedules; nothing is trained.

Costs are measured for the layers of a run's model on this machine; without a run, all computations take 1 ms.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.config.load import from_arguments
from evenstep.errors import ConfigError, PlanError, clause
from evenstep.pipeline import SCHEDULES, Layers, Layout, Plan, Schedule
from evenstep.process import EXIT_DONE
from evenstep.tools.planning.layers import balance, measure
from evenstep.tools.planning.simulate import Cost, Simulation, simulate
from evenstep.tools.planning.text import write_plans, written_schedule

MIB, GIB = 2**20, 2**30
_SHARE_S = 1e-3  # of each computation of a rank, in a run without a model


class Measured(NamedTuple):
    """Layers of a run's model with their costs, and what the run file says of its pipeline."""

    layers: Layers
    costs: Sequence[Cost]
    microbatches: int
    ranks: int | None
    stages_per_rank: int | None

    def cut(self, stages: int) -> tuple[range, ...]:
        return balance([cost.seconds for cost in self.costs], stages)


class Row(NamedTuple):
    """Simulated schedule; `alive` are its peak activations, in micro-batches of one rank's share of the model."""

    schedule: Schedule
    stages: int
    plans: tuple[Plan, ...]
    simulation: Simulation
    memory: float
    alive: float


def run(
    path: Path | None,
    settings: list[str],
    *,
    ranks: int | None,
    microbatches: int | None,
    memory_gib: float | None,
    schedule: str | None,
    out: Path | None,
) -> int:
    """Print the table; write the schedule to `out`."""
    cap = float("inf") if memory_gib is None else memory_gib * GIB
    chosen = None if schedule is None else _chosen(schedule)
    measured = None if path is None else _measured(path, settings)
    count = ranks or (measured and measured.ranks)
    batches = microbatches or (measured and measured.microbatches)
    if not count or not batches:
        raise ConfigError(f"`--{'microbatches' if count else 'ranks'}` is missing; give it.")
    rows, left_out = _simulated(count, batches, measured, chosen)
    fitting = [row for row in rows if row.memory <= cap]
    best = min(fitting, key=lambda row: (row.simulation.makespan_s, row.alive), default=None)
    print(f"{count} ranks, {batches} micro-batches; memory of the rank with the most\n")
    print(f"  {'schedule':<16}{'stages':>7}{'update':>12}{'bubble':>9}{'alive':>8}{'memory':>12}")
    for row in rows:
        mark = "*" if row is best else " " if row.memory <= cap else "!"
        time, idle = _time(row.simulation.makespan_s), row.simulation.bubble_share
        cells = f"{row.stages:>7}{time:>12}{idle:>9.1%}{row.alive:>8.4g}{_size(row.memory):>12}"
        print(f"{mark} {row.schedule.name:<16}{cells}")
    print("\nalive: micro-batches of a rank's share of the model whose activations live at once", *left_out, sep="\n")
    row = best if chosen is None else next((row for row in rows if row.schedule is chosen), None)
    if row is None:
        raise PlanError(
            "no pipeline schedule fits into `--memory-gib`; give more."
            if chosen is None
            else f"`--schedule` can't be used here: {left_out[-1]}"
        )
    word = "* the fastest: " if row is best else ""
    print(f"{word}{row.schedule.name}, {row.schedule.summary}: {_time(row.simulation.makespan_s)}")
    if measured is not None:
        cuts = measured.cut(row.stages)
        names = ", ".join(f'"{measured.layers.layers[places[0]].name}"' for places in cuts[1:])
        times = [_time(sum(measured.costs[place].seconds for place in places)) for places in cuts]
        print(f"\nthe most balanced {len(cuts)} stages: {', '.join(times)} per micro-batch")
        print(f"parallel.split_at = [{names}]")
    if out is not None:
        _write(row, out)
    return EXIT_DONE


def _measured(path: Path, settings: Sequence[str]) -> Measured:
    from evenstep.config.build import build_parts, make_model
    from evenstep.config.load import open_run
    from evenstep.parallel import device_of_rank
    from evenstep.train.build import precision_of
    from evenstep.train.update.microbatch import build_cast

    with open_run(path, from_arguments(settings)) as opened, closing(build_parts(opened.config)) as parts:
        parallel = opened.config.parallel
        device = device_of_rank(opened.config.device)
        layers = Layers.of(make_model(opened.config))
        batch, inputs = parts.first_inputs(device)
        precision = precision_of(opened.config.train.precision)
        precision.check(device)
        cast = build_cast(precision.format)
        costs = measure(layers, inputs if cast is None else cast(inputs), device=device, precision=precision)
    ranks = parallel.pipeline if parallel.pipeline > 1 else None
    return Measured(layers, costs, batch.num_microbatches, ranks, parallel.stages_per_rank)


def _chosen(name: str) -> Schedule:
    if name in SCHEDULES:
        return SCHEDULES[name]
    try:
        return written_schedule(name, Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, PlanError) as error:
        known = ", ".join(SCHEDULES)
        raise ConfigError(
            f"`--schedule` {name} is neither of {known}, nor a schedule's file: {clause(error)}."
        ) from error


def _simulated(
    ranks: int, count: int, measured: Measured | None, chosen: Schedule | None
) -> tuple[list[Row], list[str]]:
    from evenstep.pipeline.layers import flows

    rows: list[Row] = []
    left_out: list[str] = []
    written: list[Any] = [chosen] if chosen is not None and chosen.name not in SCHEDULES else []
    for schedule in (*SCHEDULES.values(), *written):
        takes_any = schedule.max_stages_per_rank is None and schedule.min_stages_per_rank > 1
        try:
            layout = schedule.layout(ranks, measured.stages_per_rank if measured is not None and takes_any else None)
            if measured is None:
                each = _SHARE_S * ranks / layout.stages
                costs = [Cost(each, each, each)] * layout.stages
            else:
                cuts = measured.cut(layout.stages)
                by_stage = [[measured.costs[place] for place in places] for places in cuts]
                costs = [Cost(*map(sum, zip(*stage, strict=True))) for stage in by_stage]
                layout = Layout(rank_of=layout.rank_of, edges=tuple(flows(measured.layers, cuts)))
            if schedule in written:
                schedule.plans(layout, range(count))  # raises for an order that is no complete update
            plans = schedule.order(layout, range(count))
        except PlanError as error:
            left_out.append(f"{schedule.name} is left out: {error}")
            continue
        made = simulate(plans, layout, costs)
        alive = max(made.peak_live) * ranks / layout.stages
        rows.append(Row(schedule, layout.stages, plans, made, max(made.peak_bytes), alive))
    if not rows:
        raise PlanError("; ".join(left_out))
    return rows, left_out


def _write(row: Row, path: Path) -> None:
    text = row.simulation.trace() if path.suffix == ".json" else write_plans(row.plans)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"`--out` can't be written: {path}: {error.strerror}.") from error
    print(f"\n{path}")


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def _size(size: float) -> str:
    if not size:
        return "-"
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / MIB:.3g} MiB"
