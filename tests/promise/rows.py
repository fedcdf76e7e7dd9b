"""The table of the battery: named runs and layouts, each compared with one process or with a plain loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from drawn import legs, plain_runs, runs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from launched import Failed, on_ranks
from optimizers import CASES
from promise_runs import ALONE, OPTIONS, Leg, Run, alone, in_float64, train, train_all, trained
from reference import by_hand, distance, share_of_way

SHA = "sha256 of all that training changes"
NEAR = "relative difference to a plain loop, float64"
DRAWN = 40  # runs that hypothesis draws
CHECKS: Any = list(HealthCheck)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement beside its bound.

    Args:
        run: gives (value, bound); numbers must not exceed their bound, texts must equal it.
    """

    name: str
    measure: str
    run: Callable[[], tuple[float, float] | tuple[str, str]]


@cache
def alone_sha256(run: Run) -> str:
    return alone(run)["sha256"]


def same(run: Run, legs: Sequence[Leg]) -> tuple[str, str]:
    """Beside one process that keeps all activations."""
    return trained(run, legs)["sha256"], alone_sha256(replace(run, recompute="none"))


def same_with_buffers(run: Run, leg: Leg) -> tuple[str, str]:
    """Recomputed, stopped and resumed, beside the same ranks without that."""
    stopped, wanted = trained(replace(run, recompute="2*"), in_turn(leg, leg)), trained(run, [leg])
    return stopped["sha256"] + stopped["buffers"], wanted["sha256"] + wanted["buffers"]


def near(run: Run, legs: Sequence[Leg]) -> tuple[float, float]:
    """Distance of parameters and average from those of a plain loop."""
    plain = in_float64(run)
    ended, (parameters, average) = trained(plain, legs), by_hand(plain)
    apart = [distance(ended["parameters"], parameters)]
    if run.ema:
        apart.append(distance(ended["ema"], average))
    return max(apart), 1e-12


def near_in_format(run: Run, unit: float) -> tuple[float, float]:
    """Distance from float64 as a share of the way that the parameters went: at most 8 roundings one after the other."""
    ended, (parameters, _) = trained(run, [ALONE]), by_hand(in_float64(run))
    return share_of_way(in_float64(run), ended["parameters"], parameters), 8 * unit


def optimizers_on(names: Sequence[str], *layouts: Leg) -> tuple[str, str]:
    """Trains with each optimizer on the layouts in turn, and gives those that have other bits or are not refused."""
    if any(leg.stages > 1 for leg in layouts):
        names = [name for name in names if not CASES[name].sparse]  # its model has one layer
    ended, wanted = (each_ended(tuple(names), ways) for ways in (tuple(in_turn(*layouts, updates=4)), (ALONE,)))
    wrong: list[str] = []
    for name, one, other in zip(names, ended, wanted, strict=True):
        last = layouts[-1]
        refused = CASES[name].is_refused(strategy=last.strategy, ranks=last.ranks, stages=last.stages)
        if refused != ("refused" in one) or (not refused and one["sha256"] != other["sha256"]):
            wrong.append(f"{name}: {one.get('because', 'other bits')}")
    return "; ".join(wrong) or "all as in the table", "all as in the table"


@cache
def each_ended(names: tuple[str, ...], legs: tuple[Leg, ...]) -> list[dict[str, Any]]:
    """The ends of runs that differ in their optimizer, which the same ranks train one after the other."""
    runs = [
        Run(optimizer=name, model="sparse" if CASES[name].sparse else "chain", micro_batch_size=4) for name in names
    ]
    ranks: list[Any] = []
    with TemporaryDirectory() as folder:
        for leg in legs:
            ranks = on_ranks(
                leg.ranks, train_all, [(run, leg, f"{folder}/{n}") for n, run in enumerate(runs)], timeout_s=600
            )
            if isinstance(ranks[0], Failed):
                raise RuntimeError(f"{leg}: {ranks}")
    return ranks[0]


def drawn_layouts() -> tuple[str, str]:
    wrong: list[str] = []

    @given(data=st.data(), run=runs())
    @settings(max_examples=DRAWN, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=CHECKS)
    def compare(data: st.DataObject, run: Run) -> None:
        ways = data.draw(legs(run))
        if trained(run, ways)["sha256"] != alone_sha256(run):
            wrong.append(f"{run}: {', '.join(map(str, ways))}")

    compare()
    return "; ".join(wrong) or "all equal", "all equal"


def drawn_cuts() -> tuple[float, float]:
    furthest = [0.0]

    @given(run=plain_runs())
    @settings(max_examples=5 * DRAWN, deadline=None, database=None, suppress_health_check=CHECKS)
    def compare(run: Run) -> None:
        with TemporaryDirectory() as folder:
            ended = train(run, ALONE, str(Path(folder) / "run"))
        furthest.append(distance(ended["parameters"], by_hand(run)[0]))

    compare()
    return max(furthest), 1e-12


def in_turn(*layouts: Leg, updates: int = 8) -> list[Leg]:
    """Each layout trains an equal part of the run."""
    ends = [updates * (place + 1) // len(layouts) for place in range(len(layouts))]
    return [replace(layout, until=0 if end == updates else end) for layout, end in zip(layouts, ends, strict=True)]


def killed(layout: Leg, *at: tuple[int, int]) -> list[Leg]:
    return [*(replace(layout, fault="kill", at=one) for one in at), layout]


def on(strategy: str, ranks: int, stages: int = 1, pipeline_schedule: str = "1f1b", **more: Any) -> Leg:
    return Leg(strategy=strategy, ranks=ranks, stages=stages, pipeline_schedule=pipeline_schedule, **more)


PLAIN = Run(ema="always")
# micro-batches of 1 differ in length, so some messages between stages are larger than all before them
GROWING = Run(tasks=("a", "b"), samples=24, recompute="*")
CUTS: dict[str, Run] = {
    "of 1 (some weigh 0)": replace(PLAIN, micro_batch_size=1),
    "of 3 (the last is short)": replace(PLAIN, micro_batch_size=3),
    "of 8": replace(PLAIN, micro_batch_size=8),
    "of 9 tokens": replace(PLAIN, micro_batch_tokens=9),
    "of 2, late weight": replace(PLAIN, micro_batch_size=2, task="late"),
    "of 9 tokens, late weight": replace(PLAIN, micro_batch_tokens=9, task="late"),
    "of 3, two tasks": replace(PLAIN, micro_batch_size=3, tasks=("a", "b"), samples=24),
    "of 3, two tasks, late weight": replace(PLAIN, micro_batch_size=3, tasks=("a", "b"), samples=24, task="late"),
    "of 3, parameter groups": replace(PLAIN, micro_batch_size=3, optimizer="groups"),
    "of 3, Muon and AdamW": replace(PLAIN, micro_batch_size=3, optimizer="Muon"),
    "of 3, cosine": replace(PLAIN, micro_batch_size=3, lr_schedule="cosine"),
    **{f"of 3, {name}": replace(PLAIN, micro_batch_size=3, optimizer=name) for name in OPTIONS},
}
LAYOUTS = [
    *(on("ddp", ranks) for ranks in (2, 3, 4, 8)),  # in a last, short global batch some ranks have no work
    *(on("zero1", ranks) for ranks in (2, 4)),
    *(on("fsdp", ranks) for ranks in (2, 3, 4)),
    on("hybrid", 4),
    *(on("ddp", ranks, ranks, kind) for ranks in (2, 4) for kind in ("1f1b", "interleaved", "zb_v")),
    *(on("ddp", 2, 2, kind) for kind in ("gpipe", "breadth_first", "zb_h1")),
    *(on(strategy, 4, 2) for strategy in ("ddp", "zero1", "fsdp")),
    on("fsdp", 4, 2, "zb_v"),
]
MODELS: dict[str, Run] = {
    "tied": replace(PLAIN, model="tied"),
    "frozen": replace(PLAIN, model="frozen"),
    "nothing to train in a stage": replace(PLAIN, model="half frozen"),
    "modules that draw in several places": replace(PLAIN, model="drawing"),
    "average from update 3": replace(PLAIN, ema="late"),
    "batch normalisation": Run(model="normalised", micro_batch_size=2),
    "encoder and decoder": replace(PLAIN, model="translator", task="translate"),
    "loss that draws": replace(PLAIN, task="sampled"),
    "two tasks": replace(PLAIN, tasks=("a", "b"), samples=24),
    "activations recomputed": replace(PLAIN, recompute="2*"),
    "all activations recomputed": replace(PLAIN, recompute="*", model="drawing"),
    "Plateau": replace(PLAIN, lr_schedule="plateau"),
    "parameter groups": replace(PLAIN, optimizer="groups"),
    "Muon and AdamW": replace(PLAIN, optimizer="Muon"),
    **{name: replace(PLAIN, optimizer=name) for name in OPTIONS if name != "AdamW"},
}
MOVES: dict[str, list[Leg]] = {
    "ddp 1, 4, 2": in_turn(ALONE, on("ddp", 4), on("ddp", 2)),
    "ddp 3, fsdp 4, one process": in_turn(on("ddp", 3), on("fsdp", 4), ALONE),
    "one process, zero1 4, fsdp 2": in_turn(ALONE, on("zero1", 4), on("fsdp", 2)),
    "2 stages, 4 interleaved, one process": in_turn(on("ddp", 2, 2), on("ddp", 4, 4, "interleaved"), ALONE),
    "2 stages × fsdp 2, hybrid 4, 2 stages × zero1 2": in_turn(
        on("fsdp", 4, 2), on("hybrid", 4), on("zero1", 4, 2, "interleaved")
    ),
}
KILLS: dict[str, list[Leg]] = {
    "one process, before the first checkpoint": killed(ALONE, (1, 0)),
    "one process, three times": killed(ALONE, (2, 0), (4, 0), (7, 0)),
    "one process, 2 workers": killed(replace(ALONE, workers=2), (4, 0)),
    "ddp 3, rank 1": killed(on("ddp", 3), (5, 1)),
    "fsdp 2, rank 0": killed(on("fsdp", 2), (4, 0)),
    "2 stages, rank 1, then zero1 4": [replace(on("ddp", 2, 2), fault="kill", at=(5, 1)), on("zero1", 4)],
}
OPTIMIZERS_ON = [  # each leaves its layout once and takes it up, or another one
    *([leg, leg] for leg in (ALONE, on("ddp", 2), on("zero1", 2), on("fsdp", 2), on("ddp", 2, 2), on("hybrid", 4))),
    *([on(strategy, 4, 2), on(strategy, 2)] for strategy in ("zero1", "fsdp")),
    [on("ddp", 2, 2), on("zero1", 2), on("fsdp", 2), ALONE],
]
UNITS = {"bf16-mixed": 2.0**-8, "16-mixed": 2.0**-11, "bf16-true": 2.0**-8, "16-true": 2.0**-11}
FORMATS = (*UNITS, "bf16-true-no-master", "16-true-no-master", *(["float8-mixed"] if find_spec("torchao") else []))
MEMORY = {
    "one process": ALONE,
    "ddp 2": on("ddp", 2),
    "zero1 2": on("zero1", 2),
    "fsdp 2": on("fsdp", 2),
    "2 stages": on("ddp", 2, 2),
    "2 stages × fsdp 2": on("fsdp", 4, 2, "zb_h1"),
}


def rows() -> list[Row]:
    made = [
        Row(name=f"cut: micro-batches {name}", measure=NEAR, run=partial(near, run, [ALONE]))
        for name, run in CUTS.items()
    ]
    made += [Row(name=f"layout: {leg}", measure=SHA, run=partial(same, PLAIN, [leg])) for leg in LAYOUTS]
    for name, run in MODELS.items():
        shards = "zero1" if name == "Muon and AdamW" else "fsdp"
        for leg in (on(shards, 3), on("ddp", 2, 2), on(shards, 4, 2, "interleaved")):
            made.append(Row(name=f"{name}: {leg}", measure=SHA, run=partial(same, run, [leg])))
    for leg in (ALONE, on("ddp", 2), on("fsdp", 2), on("ddp", 2, 2)):
        for name in ("centred", "normalised"):
            run = Run(model=name, micro_batch_size=3)  # of an odd number of micro-batches: ranks have unequal work
            row = Row(name=f"buffers, {name}: {leg}", measure=SHA, run=partial(same_with_buffers, run, leg))
            made.append(row)
    for kind in ("breadth_first", "zb_v"):
        leg = on("ddp", 2, 2, kind)
        made.append(Row(name=f"messages that grow: {leg}", measure=SHA, run=partial(same, GROWING, [leg])))
    made += [Row(name=f"resumed: {name}", measure=SHA, run=partial(same, PLAIN, ways)) for name, ways in MOVES.items()]
    made += [Row(name=f"killed: {name}", measure=SHA, run=partial(same, PLAIN, ways)) for name, ways in KILLS.items()]
    muon = replace(PLAIN, optimizer="Muon")
    for name, ways in (("zero1 2", killed(on("zero1", 2), (4, 1))), ("2 stages", killed(on("ddp", 2, 2), (5, 1)))):
        made.append(Row(name=f"killed: Muon and AdamW, {name}", measure=SHA, run=partial(same, muon, ways)))
    for ways in OPTIMIZERS_ON:
        where = ", then ".join(map(str, ways))
        made.append(Row(name=f"optimizers: {where}", measure=SHA, run=partial(optimizers_on, tuple(CASES), *ways)))
    for name in FORMATS:
        run = replace(PLAIN, precision=name, micro_batch_size=2)
        for ways in ([on("ddp", 2)], [on("ddp", 2, 2)], [*killed(ALONE, (4, 0))[:1], on("ddp", 2)]):
            where = ", then ".join(map(str, ways))
            made.append(Row(name=f"format {name}: {where}", measure=SHA, run=partial(same, run, ways)))
    for name in ("16-true", "16-true-no-master"):
        run = replace(PLAIN, precision=name, micro_batch_size=2, loss_scale=2.0**24)  # too much: it is halved
        for leg in (on("ddp", 2), on("fsdp", 2), on("ddp", 2, 2)):
            made.append(Row(name=f"overflow, {name}: {leg}", measure=SHA, run=partial(same, run, [leg])))
    for name, unit in UNITS.items():
        run = Run(precision=name, optimizer="SGD", dropout=0.0, shuffle=False, micro_batch_size=2)
        measure = "share of the way apart from float64"
        made.append(Row(name=f"format {name} beside float64", measure=measure, run=partial(near_in_format, run, unit)))
    for name, leg in MEMORY.items():
        ways = [replace(leg, fault="memory", at=(3, leg.ranks - 1))]
        run = replace(PLAIN, micro_batch_size=4)
        made.append(Row(name=f"fault: out of memory, {name}", measure=NEAR, run=partial(near, run, ways)))
        ways = [replace(leg, fault="nan", at=(3, leg.ranks - 1))]
        made.append(Row(name=f"fault: NaN tried again, {name}", measure=SHA, run=partial(same, PLAIN, ways)))
    for strategy, ranks in (("fast ddp", 4), ("fast zero1", 2), ("fast fsdp", 2)):
        leg = on(strategy, ranks)
        made.append(Row(name=f"fast sums: {leg}", measure=NEAR, run=partial(near, PLAIN, [leg])))
    for name in ("model", "update"):
        run = Run(compile=name, micro_batch_size=4, samples=24, model="normalised")
        ways = killed(ALONE, (3, 0), (6, 0))
        made.append(Row(name=f"compiled {name}: killed twice", measure=SHA, run=partial(same, run, ways)))
    compiled = Run(compile="model", micro_batch_size=4, samples=24)
    for leg in (on("ddp", 2), on("fsdp", 2), on("ddp", 2, 2), on("ddp", 2, 2, "zb_h1")):
        made.append(Row(name=f"compiled model: {leg}", measure=SHA, run=partial(same, compiled, [leg])))
    made.append(Row(name=f"drawn: {DRAWN} runs on any layouts", measure=SHA, run=drawn_layouts))
    made.append(Row(name=f"drawn: {5 * DRAWN} cuts", measure=NEAR, run=drawn_cuts))
    return made
