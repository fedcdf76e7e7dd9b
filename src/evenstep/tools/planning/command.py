"""`evenstep plan [RUN.toml]`: what a pipeline would cost under each schedule, and a picture of one.

Costs are given, or measured for the layers of a run's model on this machine; then it proposes how to cut the model as
well. Nothing is trained; only what `--out` names is written.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from evenstep.arguments import advice
from evenstep.cli.arguments import in_home
from evenstep.config.sources import Setting, from_arguments, from_environment
from evenstep.errors import ArgumentError, ConfigError, PlanError, clause
from evenstep.pipeline import SCHEDULES, Layout, Plan, Schedule
from evenstep.process import EXIT_DONE
from evenstep.tools.planning.costs import GIB, MIB, Layered, costs_of, read_costs
from evenstep.tools.planning.draw import draw_text, draw_trace
from evenstep.tools.planning.options import FIELDS, SHARE_KEYS, Options, checked
from evenstep.tools.planning.simulate import Simulation, simulate
from evenstep.tools.planning.text import to_torch_csv, write_plans, written_schedule

_COLOURS = {"F": "on blue", "B": "on green", "I": "on dark_orange3", "W": "on purple"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A schedule, simulated."""

    schedule: Schedule
    layout: Layout
    plans: tuple[Plan, ...]
    simulation: Simulation

    @property
    def peak_shares(self) -> float:
        """Peak activations in micro-batches of one rank's share of the model."""
        return max(self.simulation.peak_live) * self.layout.ranks / self.layout.stages


def run(path: str, settings: list[str]) -> int:
    """Print the table, then draw."""
    given, more = _parse(settings)
    given |= {key: in_home(given[key]) for key in ("costs", "out") if key in given}
    chosen = _chosen(given.get("schedule", ""))
    if given.get("draw") == "trace" and "out" not in given:
        raise ConfigError(["`--draw trace` is a file's content; name the file: `--out FILE`."])
    layered = None
    if path and "costs" in given:
        raise ConfigError(["`--costs` can't be given with a run file, whose costs are measured; leave one out."])
    if given.get("costs"):
        from_file, layered = read_costs(Path(given["costs"]))
        given = {**from_file, **given}
    if more and not path:
        raise ConfigError(
            [f"`{more[0].origin}` sets a key of a run file, but none is given: `evenstep plan RUN.toml ...`."]
        )
    if path:
        layered, of_run = _measured(path, more)
        given = of_run | given
    useless = [f"--{key.replace('_', '-')}" for key in SHARE_KEYS if key in given and layered is not None]
    if useless:
        raise ConfigError([f"`{useless[0]}` can't be given with the costs of layers, which say it; leave one out."])
    options = Options(**given)
    missing = [f"`--{name}` is missing; give it." for name in ("ranks", "microbatches") if not getattr(options, name)]
    if missing:
        raise ConfigError(missing)
    rows, left_out = _simulated(options, layered, chosen)
    best = _best(rows, options.memory_gib * GIB)
    _print_table(rows, left_out, best, options)
    if chosen is None and best is None:
        raise PlanError(
            f"no pipeline schedule stays within the {options.memory_gib:g} GiB of `--memory-gib`; the least that one "
            f"needs is {min(max(row.simulation.peak_bytes) for row in rows) / GIB:.3g} GiB: take more ranks or smaller "
            f"micro-batches."
        )
    row = best if chosen is None else next((row for row in rows if row.schedule is chosen), None)
    if row is None:
        raise PlanError(f"{chosen.name if chosen else ''} cannot be used here: {left_out[-1]}")
    if layered is not None:
        _print_cut(row, layered)
    _print_links(row)
    _draw(row, options)
    return EXIT_DONE


def _parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[Setting]]:
    """The options that are given, by the name of their field, and the settings of a run, whose names have a dot.

    >>> _parse(["--ranks", "8"])
    ({'ranks': 8}, [])
    """
    given: dict[str, Any] = {}
    settings: list[Setting] = []
    faults: list[str] = []
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    unknown = [name for name in names if "." not in name and name not in FIELDS]
    if unknown:  # before it is asked for its value, which it may not have
        raise ConfigError([f"`{name}` is not an option of `evenstep plan`; {advice(name, FIELDS)}" for name in unknown])
    for each in from_arguments(arguments):
        name = each.origin
        if len(each.path) > 1:
            settings.append(each)
        else:
            try:
                given[FIELDS[name].name] = checked(name, each.text)
            except ConfigError as error:
                faults += error.faults
    if faults:
        raise ConfigError(faults)
    return given, settings


def _measured(path: str, settings: Sequence[Setting]) -> tuple[Layered, dict[str, Any]]:
    from evenstep.builders import build_parts, make_model, open_run
    from evenstep.builders.options import build_precision
    from evenstep.parallel import device_of_rank
    from evenstep.pipeline import Layers
    from evenstep.pipeline.split import flows
    from evenstep.tools.planning.measure import measure
    from evenstep.train.update.transfer import build_cast

    with open_run(Path(path), [*from_environment(os.environ), *settings]) as opened:
        parts = build_parts(opened)
        with closing(parts):
            device = device_of_rank(opened.config.device)
            layers = Layers.of(make_model(opened))
            batch, inputs = parts.first_inputs(device)
            precision = build_precision(opened.config)
            precision.check(device)
            cast = build_cast(precision.format)
            costs = measure(
                layers,
                inputs if cast is None else cast(inputs),
                device=device,
                context=lambda: precision.forward(device),
                convert=precision.computes_in,
            )
        of_run: dict[str, Any] = {"microbatches": batch.num_microbatches}
        if opened.config.parallel.pipeline > 1:
            of_run["ranks"] = opened.config.parallel.pipeline
    return Layered(layers=tuple(costs), flows=lambda cuts: flows(layers, cuts)), of_run


def _chosen(asked: str) -> Schedule | None:
    if not asked:
        return None
    if asked in SCHEDULES:
        return SCHEDULES[asked]
    file = Path(asked)
    if file.is_file():
        try:
            return written_schedule(asked, file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                [f"`--schedule` names the file {asked}, which can't be read: {clause(str(error))}."]
            ) from error
        except PlanError as error:
            raise ConfigError([f"`--schedule` names the file {asked}, but {error}"]) from error
    neither = f"`--schedule` is {asked}, which is neither a pipeline schedule nor a file"
    raise ConfigError([f"{neither}; {advice(asked, SCHEDULES)}"])


def _simulated(options: Options, layered: Layered | None, chosen: Schedule | None) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    left_out: list[str] = []
    microbatches = range(options.microbatches)
    schedules = [*SCHEDULES.values(), *([chosen] if chosen and chosen.name not in SCHEDULES else [])]
    for schedule in schedules:
        most = schedule.max_stages_per_rank
        several = schedule.min_stages_per_rank > 1 and most is None
        try:
            layout = schedule.layout(options.ranks, options.stages_per_rank if several else None)
            layout, costs = costs_of(options, layered, layout)
            written = schedule.name not in SCHEDULES
            plans = schedule.plans(layout, microbatches) if written else schedule.order(layout, microbatches)
            done = simulate(plans, layout, costs)
        except (ArgumentError, PlanError) as error:
            left_out.append(f"{schedule.name} is left out: {error}")
            continue
        rows.append(Row(schedule=schedule, layout=layout, plans=plans, simulation=done))
    if not rows:
        raise PlanError("; ".join(left_out))
    return rows, left_out


def _best(rows: Sequence[Row], cap: float) -> Row | None:
    within = [row for row in rows if not cap or max(row.simulation.peak_bytes) <= cap]
    return min(within, key=lambda row: (row.simulation.makespan_s, row.peak_shares), default=None)


def _print_table(rows: Sequence[Row], left_out: Sequence[str], best: Row | None, options: Options) -> None:
    cap = options.memory_gib * GIB
    print(
        f"{options.ranks} ranks, {options.microbatches} micro-batches; memory and traffic of the rank with the most\n"
    )
    print(f"  {'schedule':<16}{'stages':>7}{'update':>12}{'bubble':>9}{'alive':>8}{'memory':>12}{'sent':>12}")
    for row in rows:
        done = row.simulation
        memory = max(done.peak_bytes)
        mark = "*" if row is best else "!" if cap and memory > cap else " "
        print(
            f"{mark} {row.schedule.name:<16}{row.layout.stages:>7}{_time(done.makespan_s):>12}"
            f"{done.bubble_share:>9.1%}{row.peak_shares:>8.4g}{_size(memory):>12}{_size(max(done.bytes_sent)):>12}"
        )
    print("\nalive: micro-batches of a rank's share of the model whose activations live at once")
    if best is not None:
        print(f"* the fastest{' within the cap' if cap else ''}: {best.schedule.name}, {best.schedule.summary}")
    if cap and any(max(row.simulation.peak_bytes) > cap for row in rows):
        print(f"! more than {options.memory_gib:g} GiB")
    print("\n".join(left_out), end="\n" if left_out else "")


def _print_cut(row: Row, layered: Layered) -> None:
    cuts = layered.cut(row.layout.stages)
    names = ", ".join(f'"{layered.layers[places[0]].name}"' for places in cuts[1:])
    seconds = [sum(layered.layers[place].seconds for place in places) for places in cuts]
    print(f"\nthe most balanced {len(cuts)} stages: {', '.join(map(_time, seconds))} per micro-batch")
    print(f"parallel.split_at = [{names}]")


def _print_links(row: Row) -> None:
    links = {link: size for link, size in row.simulation.link_bytes.items() if size}
    if len(links) > 2 * row.layout.ranks:
        busiest = max(links, key=lambda link: links[link])
        print(f"\n{len(links)} links between ranks; the busiest: {_link(busiest, links[busiest])}")
    elif links:
        print(f"\nsent from rank to rank: {', '.join(_link(link, size) for link, size in links.items())}")


def _link(link: tuple[int, int], size: float) -> str:
    return f"{link[0]}>{link[1]} {_size(size)}"


def _draw(row: Row, options: Options) -> None:
    title = f"{row.schedule.name}: {options.ranks} ranks, {options.microbatches} micro-batches"
    if options.draw == "text" and not options.out:
        _print_text(row, title, options.width)
        return
    text = {
        "text": lambda: "".join(f"{line}\n" for line in _lines(row, options.width)),
        "trace": lambda: draw_trace(row.simulation),
        "plan": lambda: write_plans(row.plans),
        "torch": lambda: to_torch_csv(row.plans),
    }[options.draw]()
    if not options.out:
        print(f"\n{text}", end="")
        return
    try:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"`--out` can't be written: {options.out}: {error.strerror}."]) from error
    print(f"\n{options.out}")


def _lines(row: Row, width: int) -> list[str]:
    return ["".join(piece for piece, _ in line) for line in draw_text(row.simulation, width=width)]


def _print_text(row: Row, title: str, width: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\n{title}, {_time(row.simulation.makespan_s)} from left to right")
    for rank, line in enumerate(draw_text(row.simulation, width=width)):
        text = Text(f"rank {rank:<3} ")
        for piece, op in line:
            text.append(piece, style="dim" if op is None else _COLOURS[op.value])
        console.print(text)
    console.print("F forward  B backward  I backward of inputs  W backward of weights  . idle")


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def _size(size: float) -> str:
    if not size:
        return "-"
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / MIB:.3g} MiB"
