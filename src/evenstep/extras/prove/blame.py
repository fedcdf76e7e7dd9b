"""Names what a row fails by: the part of the run whose work depends on the cut, or is lost when it is resumed.

Two traces of one update, with the same parameters, are held against each other from the data on: batches, transforms,
module by module, output, loss, weight, gradients, steps. The first point at which they differ is said, with what was
seen there beside: buffers that move, generators that are drawn from, hooks on parameters.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, cast

from evenstep.arguments import first_of
from evenstep.data import GlobalBatch
from evenstep.events import Hook
from evenstep.extras.prove.alike import apart, order_of, other_rows, padded_otherwise, worst
from evenstep.extras.prove.runs import run_once, through
from evenstep.extras.prove.subject import Subject, Variant
from evenstep.extras.prove.trace import TORCHS, MicrobatchTrace, ModuleCall, Tracer, UpdateTrace, Values
from evenstep.internals import has_backward_hooks, has_gradient_hooks
from evenstep.train import Task

Across = Literal["cuts", "runs", "workers", "resume", "processes", "ranks"]  # what two traces differ in
Open = Callable[[Variant], AbstractContextManager[Subject]]

_EXACT = ("runs", "workers", "resume", "processes")  # of which the same bits are asked
_MOST = 5
_BY: Mapping[Across, str] = {
    "runs": "goes by time, a file, a generator that nobody seeds, or what an earlier run has left in this process (a "
    "global, an attribute of a class)",
    "workers": "goes by the worker that reads (`get_worker_info`), or keeps something from one sample to another, "
    "which each worker does for itself",
    "resume": "goes by something that no checkpoint holds",
    "processes": "goes by what each process has of its own (`hash` and the order of a set of strings, `id`, "
    "`os.getpid`, time), or by a file",
    "ranks": "goes by the rank, or by how many there are (`RANK`, `WORLD_SIZE`, `torch.distributed`), or draws what "
    "nobody keys for the micro-batch",
}
_OF_MICROBATCHES = tuple(name for name in vars(Hook) if name.endswith(("_microbatch", "_forward", "_backward")))
_OF_AFTER = ("before_step", "after_step", "after_update", "before_update", "before_epoch", "after_epoch")
_OF_BATCH = "the batch holds other values for the same samples"
_ROWS = "the micro-batches hold"


def traced(
    open_subject: Open, variant: Variant, update: int, *, folder: Path | None = None
) -> tuple[Tracer, dict[str, str]]:
    """The trace of an update of a run, and the classes and hooks of the model, in words."""
    made: list[Tracer] = []
    samples: list[list[Sequence[int]]] = []
    about: dict[str, str] = {}

    def hooks(subject: Subject) -> Sequence[Hook]:
        made.append(Tracer(subject, update))
        about.update(_about(subject))
        return made

    def note(batch: GlobalBatch) -> None:
        samples.append([one.samples for one in batch.microbatches])

    run_once(open_subject, variant, updates=update, hooks=hooks, folder=folder, data=lambda data: through(data, note))
    trace = made[0]
    if folder is None and len(samples) >= update and len(samples[update - 1]) == len(trace.made.microbatches):
        for microbatch, numbers in zip(trace.made.microbatches, samples[update - 1], strict=True):
            microbatch.samples = numbers
    return trace, about


def causes_of_cut(open_subject: Open, one: Variant, other: Variant, *, updates: int) -> list[str]:
    """What makes two variants of a run differ, in sentences; none where it was not found.

    Args:
        updates: how many to look at, one after the other.
    """
    kept: list[str] = []
    for update in range(1, updates + 1):
        (whole, about), (cut, _) = traced(open_subject, one, update), traced(open_subject, other, update)
        across: Across = "workers" if other.workers else "runs" if one.cut == other.cut else "cuts"
        found = first_difference(whole.made, cut.made, about, across=across, update=update)
        if found:
            own = {"runs": _unlike(whole.made.states, cut.made.states, "run"), "cuts": _kept(cut)}.get(across, [])
            return [found, *own]
        kept = kept or [
            way for way in cut.moved if way.startswith("model.") and cut.states[1][way] != whole.states[1].get(way)
        ]
    if kept:
        return [f"forwards keep other values of each micro-batch in {listed(kept)}, though all else is the same"]
    return []


def causes_elsewhere(
    open_subject: Open,
    variant: Variant,
    elsewhere: Callable[[int], UpdateTrace],
    *,
    updates: int,
    across: Across = "ranks",
) -> list[str]:
    """What makes a run in other processes, or on several ranks, another, in sentences; none where it was not found.

    Args:
        variant: of the run in this process.
        elsewhere: gives the trace of an update there, on all ranks.
    """
    for update in range(1, updates + 1):
        (trace, about), there = traced(open_subject, variant, update), elsewhere(update)
        if found := first_difference(trace.made, there, about, across=across, update=update):
            return [found, *(_unlike(trace.made.states, there.states, "process") if across == "processes" else ())]
    return []


def causes_of_resume(open_subject: Open, variant: Variant, *, stop_after: int, updates: int) -> list[str]:
    """What a run that goes on from a checkpoint after so many updates has lost, in sentences."""
    only_lost: list[str] = []
    for update in range(stop_after + 1, updates + 1):
        with tempfile.TemporaryDirectory() as name:
            run_once(open_subject, variant, updates=stop_after, folder=Path(name))
            whole, about = traced(open_subject, variant, update)
            resumed, _ = traced(open_subject, variant, update, folder=Path(name))
        found = first_difference(whole.made, resumed.made, about, across="resume", update=update)
        lost = _lost(whole, resumed, found)
        if found:
            of_data = found.startswith((_OF_BATCH, _ROWS))
            return [*lost, *([found] if of_data or not lost else [])]
        only_lost = only_lost or lost
    return only_lost


def _lost(whole: Tracer, resumed: Tracer, found: str) -> list[str]:
    """What a run does not hold that was resumed, as an update begins of which `found` is said."""
    of_data, kept = found.startswith((_OF_BATCH, _ROWS)), resumed.states[0]
    aside = ("model", "task", "hook", "optimizer", "lr_schedule") if of_data else ("data", "collate")
    lost = [way for way, state in whole.states[0].items() if kept.get(way) != state and not way.startswith(aside)]
    own = [way for way in lost if way in whole.moved or way not in kept or of_data] or lost
    if not own:
        return []
    instead = (
        "draw from the generators of torch, numpy or Python, which are seeded for each sample, let a sample follow "
        "from its number and `set_epoch`, and copy it before it is changed"
        if of_data
        else "keep them in buffers, or in the `state_dict` of what they belong to"
    )
    return [f"these are other after a resume than they were, since no checkpoint holds them: {listed(own)}; {instead}"]


def _unlike(one: Mapping[str, str], other: Mapping[str, str], across: str) -> list[str]:
    """What two runs hold differently as the same update begins."""
    ways = [way for way in {**one, **other} if one.get(way) != other.get(way) and not way.startswith("optimizer")]
    return [f"as that update begins these are other in each {across}: {listed(ways)}"] if ways else []


def _kept(trace: Tracer) -> list[str]:
    """What moved in the update that nobody keeps equal between cuts."""
    ways = [way for way in trace.moved if not way.startswith(("optimizer", "data", "lr_schedule"))]
    if not ways:
        return []
    return [f"in that update these changed as well, and so with every micro-batch: {listed(ways)}"]


def listed(names: Sequence[str]) -> str:
    """Names in a sentence; of many those of what they are in, and of those the first few."""
    if len(names) > _MOST:
        parts = [name.partition("[") for name in names]
        names = list(dict.fromkeys(f"{stem}[…]" if bracket else stem for stem, bracket, _ in parts))
    if len(names) > _MOST:
        names = list(dict.fromkeys(f"{name.rpartition('.')[0]}.…" if "." in name else name for name in names))
    return first_of([f"`{name}`" for name in names], _MOST)


def _about(subject: Subject) -> dict[str, str]:
    """The classes of modules and tasks, and hooks on parameters."""
    found = {f"module {name}": type(module).__name__ for name, module in subject.model.named_modules()}
    found |= {f"task {name}": type(task).__name__ for name, task in subject.tasks.items()}
    if each := _that_hear(subject, _OF_MICROBATCHES):
        found["hooks"] = f"what is called for each micro-batch ({listed(each)})"
    if after := _that_hear(subject, _OF_AFTER):
        found["after"] = f" ({listed(after)})"
    for name, one in subject.model.named_parameters():
        if has_gradient_hooks(one):
            found[f"hook {name}"] = (
                "it has a hook of its own (`register_hook`), which sees the gradient of a micro-batch"
            )
    for name, module in subject.model.named_modules():
        if has_backward_hooks(module):
            found[f"hook {name}."] = f"module `{name}` has a backward hook, which sees gradients of a micro-batch"
    return found


def _that_hear(subject: Subject, moments: Sequence[str]) -> list[str]:
    """The methods of the user's hooks and tasks that are told of such moments."""
    tellers = [(hook.name, hook) for hook in subject.hooks]
    tellers += [(type(task).__name__, cast("Hook", task)) for task in subject.tasks.values()]
    return [
        f"{name}.{moment}"
        for name, one in tellers
        for moment in moments
        if getattr(type(one), moment, None) not in (None, getattr(Hook, moment, None), getattr(Task, moment, None))
    ]


def first_difference(
    one: UpdateTrace, other: UpdateTrace, about: Mapping[str, str], *, across: Across, update: int = 1
) -> str:
    """Where two traces of one update part, in a sentence; "" where they do not."""
    is_exact = across in _EXACT
    start = worst(one.begin, other.begin, exact=is_exact)
    if start and across == "resume":
        return f"parameter `{start}` is another when the run goes on: what sets it {_BY['resume']}"
    if start and update > 1:
        by = _BY.get(across) or "draws numbers after the last micro-batch, or counts them"
        return (
            f"parameter `{start}` is another as update {update} begins, though update {update - 1} was the same when "
            f"it was looked at: what writes to it beside the step{about.get('after', '')} {by}"
        )
    if start:
        return (
            f"parameter `{start}` is another from the beginning: it is drawn from something that `seed` does not seed "
            f"(time, `os.urandom`, a generator without a seed)"
        )
    moved = _moved_between(one.microbatches, other.microbatches)
    if moved and across == "ranks" and not _moved_between(one.microbatches):
        return (
            f"{listed(moved)} are not the same on all ranks as update {update} begins: what writes to them beside the "
            f"step{about.get('after', '')} {_BY[across]}"
        )
    if moved:
        return (
            f"parameters change between the micro-batches of one update: {listed(moved)}. A forward or "
            f"{_by_hooks(about)} writes to them; only the optimizer may, once per update"
        )
    for task in dict.fromkeys(microbatch.task for microbatch in one.microbatches):
        mine, theirs = ([each for each in trace.microbatches if each.task == task] for trace in (one, other))
        found = _in_microbatches(mine, theirs, about, across=across)
        if found:
            return found
    if gradient := worst(one.gradient, other.gradient, exact=is_exact):
        return (
            f"the gradient of `{gradient}` differs though all outputs and losses are the same: "
            f"{_on_the_way(gradient, one, about)}"
        )
    if step := worst(one.end, other.end, exact=is_exact):
        why = "a rate that each micro-batch changes, state that is not in `state_dict`, time, an own count"
        if across == "resume" and "after_epoch" in about.get("after", ""):
            why += "; a stop ends an epoch as well: `after_epoch` then has `event.complete` false"
        return (
            f"parameter `{step}` differs after the step though its gradient was the same: the optimizer, the LR "
            f"schedule or {_by_hooks(about)} steps it by something else ({why})"
        )
    return ""


def _on_the_way(gradient: str, one: UpdateTrace, about: Mapping[str, str]) -> str:
    """What may change the gradient of a parameter after the loss: its own hooks, else those that it comes through."""
    hooks = {key.removeprefix("hook "): text for key, text in about.items() if key.startswith("hook ")}
    own = [text for key, text in hooks.items() if key == gradient or (key.endswith(".") and gradient.startswith(key))]
    if own:
        return own[0]
    custom = sorted({name for each in one.microbatches for name in each.custom})
    through = [text for key, text in hooks.items() if key.endswith(".")]
    if custom:
        through.append(f"it comes through {listed(custom)}, an autograd function of its own")
    return "; ".join(through) or (
        f"{_by_hooks(about)} changes it on its way, or a forward detaches or freezes by a count of its own"
    )


def _moved_between(*traces: Sequence[MicrobatchTrace]) -> list[str]:
    """Parameters that are others in a later micro-batch than in the first, of one process."""
    found = {
        name
        for microbatches in traces
        for each in microbatches
        for name, value in each.parameters.items()
        if microbatches[0].parameters.get(name) != value
    }
    return sorted(found)


def _by_hooks(about: Mapping[str, str]) -> str:
    """What to look at where a hook may have done it: those of the user that are called for each micro-batch."""
    return about.get("hooks") or f"a hook{about.get('after', '')}"


def _in_microbatches(
    one: Sequence[MicrobatchTrace], other: Sequence[MicrobatchTrace], about: Mapping[str, str], *, across: Across
) -> str:
    order = order_of(one, other)
    kind = about.get(f"task {one[0].task}", "Task")

    def differs(values: Callable[[MicrobatchTrace], Values]) -> str | None:
        return apart([values(each) for each in one], [values(each) for each in other], order, exact=across in _EXACT)

    def drawn(method: str) -> str:
        words = sorted({word for each in (*one, *other) for word in each.drew.get(method, ())} - {TORCHS})
        return f" draws from {' and '.join(words)}, which gives other numbers in another cut" if words else ""

    way = differs(lambda each: each.batch)
    if way is not None:
        why = "draws random numbers for a micro-batch, looks at all samples of one, or keeps something for the next"
        return f"{_OF_BATCH}{_at(way)}: the dataset or its `collate` {_BY.get(across) or why}"
    way = differs(lambda each: each.transformed)
    if way is not None:
        by = _BY.get(across) or drawn("transform").strip()
        return f"`{kind}.transform` gives other values for the same samples{_at(way)}{f': it {by}' if by else ''}"
    found = _in_modules(one, other, about, order, across=across)
    if found:
        return found
    if differs(lambda each: each.output) is not None:
        return f"`{kind}.postprocess`, or what the model does outside of its modules, gives other values"
    batches = [[each.batch for each in microbatches] for microbatches in (one, other)]
    if rows := other_rows(*batches):
        return (
            f"{_ROWS} {rows[1]} rows, and the whole {rows[0]}, for the same samples: `collate` drops or repeats "
            f"some, or keeps them back for the next"
        )
    weights = [[each.weight or 0.0 for each in microbatches] for microbatches in (one, other)]
    if None not in (each.weight for each in (*one, *other)) and not math.isclose(
        sum(weights[0]), sum(weights[1]), rel_tol=1e-6
    ):
        return (
            f"the weights of the micro-batches add up to {sum(weights[1]):g}, but the weight of the whole is "
            f"{sum(weights[0]):g}: `{kind}.weight` must count the units that the loss covers (padding is none)"
        )
    losses = [[each.loss or 0.0 for each in microbatches] for microbatches in (one, other)]
    is_other = not math.isclose(sum(losses[0]), sum(losses[1]), rel_tol=1e-6) or (
        across in _EXACT and losses[0] != losses[1]
    )
    if is_other and across in _BY:
        there = {"ranks": "of all ranks", "resume": "of the resumed run"}.get(across, "of the other run")
        return (
            f"the losses {there} add up to {sum(losses[1]):.6g}, but those of the first one to {sum(losses[0]):.6g}, "
            f"though all outputs are the same: `{kind}.loss` {_BY[across]}"
        )
    if is_other:
        widths = "counts padding or divides by the padded length, " if padded_otherwise(*batches) else ""
        return (
            f"the losses of the micro-batches add up to {sum(losses[1]):.6g}, but the loss of the whole is "
            f"{sum(losses[0]):.6g}, though all outputs are the same: `{kind}.loss`"
            + (
                drawn("loss")
                or f" is no sum over its units, {widths}or keeps something from one micro-batch to the next"
            )
        )
    return ""


def _in_modules(
    one: Sequence[MicrobatchTrace],
    other: Sequence[MicrobatchTrace],
    about: Mapping[str, str],
    order: list[int] | None,
    *,
    across: Across,
) -> str:
    for name, number in one[0].calls:
        mine, theirs = ([each.calls.get((name, number)) for each in microbatches] for microbatches in (one, other))
        if None in mine or None in theirs:
            continue
        calls, others = cast("list[ModuleCall]", mine), cast("list[ModuleCall]", theirs)
        is_exact = across in _EXACT
        if apart([each.gave for each in calls], [each.gave for each in others], order, exact=is_exact) is None:
            continue
        if apart([each.given for each in calls], [each.given for each in others], order, exact=is_exact) is not None:
            continue
        moved = dict.fromkeys(
            way[1:] if way.startswith("@") else f"{inner}.{way}".lstrip(".")
            for microbatch in (*one, *other)
            for (inner, _), call in microbatch.calls.items()
            if inner == name or f"{inner}.".startswith(f"{name}.")
            for way in call.moved
        )
        return _of_module(name, about.get(f"module {name}", "Module"), [*calls, *others], list(moved), across=across)
    return ""


def _of_module(name: str, kind: str, calls: Sequence[ModuleCall], moved: Sequence[str], *, across: Across) -> str:
    """What is said of a module whose outputs differ though its inputs do not.

    Args:
        moved: what it and those below it hold and have changed.
    """
    place = f"module `{name}` ({kind})" if name else f"the model ({kind})"
    drew = sorted({word for call in calls for word in call.drew})
    if "BatchNorm" in kind:
        return (
            f"{place} normalises each micro-batch by its own statistics (BatchNorm): GroupNorm, or "
            f'`norm_statistics="frozen"`, does not'
        )
    if drew and across == "cuts":
        return f"{place} draws from {' and '.join(drew)}, which gives other numbers in another cut"
    if moved:
        return f"{place} goes by {listed(moved)}, which its forwards change from one micro-batch to the next"
    if across in _BY:
        by = f" draws from {' and '.join(drew)}, which it seeds by itself, and" if drew else ""
        return f"{place}{by} gives other outputs for the same inputs: it {_BY[across]}"
    return (
        f"{place} gives a sample another output in other company: it looks at the micro-batch as a whole (a mean over "
        f"samples, negatives of the same batch, padding that counts)"
    )


def _at(way: str) -> str:
    return f" at `{way}`" if way else ""
