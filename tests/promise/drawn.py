"""Runs and legs that hypothesis draws."""

from dataclasses import replace

from hypothesis import strategies as st
from promise_runs import ALONE, NEED_WHOLE, OPTIONS, Leg, Run, in_float64

_TASKS = ["words", "sampled", "late"]
_STAGED = ("1f1b", "gpipe", "interleaved", "breadth_first", "zb_h1", "zb_v")


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run of any kind."""
    model = draw(st.sampled_from(["chain", "tied", "frozen", "half frozen", "drawing", "normalised", "translator"]))
    named = ["groups", "Muon"] if model == "chain" else []
    several = model != "translator" and draw(st.booleans())
    both = model == "tied" and several  # a late weight beside other tasks is refused in stages
    schedules = ["none", "warmup", "cosine"]
    if model != "normalised" and not several:  # running statistics, which evaluation reads, are means over ranks
        schedules.append("plateau")
    return Run(
        model=model,
        task="translate" if model == "translator" else draw(st.sampled_from(_TASKS[: 2 if both else 3])),
        tasks=("a", "b") if several else ("",),
        samples=24 if several else draw(st.sampled_from([24, 26])),
        optimizer=draw(st.sampled_from([*OPTIONS, *named])),
        precision=draw(st.sampled_from(["32-true", "32-true", "bf16-mixed", "bf16-true", "16-true"])),
        lr_schedule=draw(st.sampled_from(schedules)),
        clip_norm=draw(st.sampled_from([None, 0.1, 0.5])),
        ema=draw(st.sampled_from(["", "always", "late"])),
        micro_batch_size=draw(st.sampled_from([1, 2, 3])),
        micro_batch_tokens=None if model == "normalised" else draw(st.sampled_from([None, None, 9])),
        shuffle=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "none", "*", *([] if model == "translator" else ["2*"])])),
    )


@st.composite
def plain_runs(draw: st.DrawFn) -> Run:
    """A run in float64 that a plain loop can repeat."""
    run = in_float64(draw(runs()))
    return replace(
        run,
        model="chain" if run.model in ("translator", "normalised", "drawing") else run.model,
        task=run.task if run.task in ("words", "late") else "words",
        lr_schedule="none" if run.lr_schedule == "plateau" else run.lr_schedule,
    )


@st.composite
def layouts(draw: st.DrawFn, run: Run, most_ranks: int) -> Leg:
    """Ranks that can train a run."""
    ranks = draw(st.integers(1, most_ranks))
    in_stages = ranks % 2 == 0 and not (run.task == "late" and len(run.tasks) > 1)  # refused
    stages = draw(st.sampled_from([1, 2])) if in_stages else 1
    if ranks == 1:
        return replace(ALONE, workers=draw(st.sampled_from([0, 2])))
    replicas = ranks // stages
    # torch's batch normalisation on CPUs does not take the formats that shards have with 16-bit parameters
    no_shards = run.optimizer in NEED_WHOLE or (run.model == "normalised" and run.precision in ("bf16-true", "16-true"))
    shards = [] if no_shards else ["fsdp", "hybrid"][: (replicas > 1) + (replicas == 4)]
    return Leg(
        ranks=ranks,
        strategy=draw(st.sampled_from(["ddp", "zero1", *shards])),
        stages=stages,
        pipeline_schedule=draw(st.sampled_from(_STAGED)),
    )


@st.composite
def legs(draw: st.DrawFn, run: Run, most_ranks: int = 4) -> list[Leg]:
    """One to three layouts in turn, with faults."""
    ends = sorted(draw(st.sets(st.integers(1, run.updates - 1), max_size=2)))
    made: list[Leg] = []
    for begin, end in zip([0, *ends], [*ends, 0], strict=True):
        leg = replace(draw(layouts(run, most_ranks)), until=end)
        faults = ["", "", *(["kill"] if end else []), *([] if run.precision == "16-true" else ["nan"])]
        fault = draw(st.sampled_from(faults))
        at = draw(st.integers(begin + 1, end or run.updates)), draw(st.integers(0, leg.ranks - 1))
        made.append(replace(leg, fault=fault, at=at))
    return made


__all__ = ["legs", "plain_runs", "runs"]
