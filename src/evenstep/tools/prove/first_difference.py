"""Names the first part of an update that differs between two runs.

The order is batch, transform, each module, output, weight, loss, gradient, step.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from evenstep.arguments import first_of
from evenstep.data import GlobalBatch
from evenstep.events import Hook
from evenstep.tools.prove.alike import apart, order_of, worst
from evenstep.tools.prove.runs import run_once, through
from evenstep.tools.prove.subject import Subject, Variant
from evenstep.tools.prove.trace import MicrobatchTrace, Tracer, UpdateTrace, Values

Open = Callable[[Variant], AbstractContextManager[Subject]]

_CLOSE = 1e-7  # relative difference of sums of losses and of weights that rounding makes
_MOST_STATES = 5


def traced(open_subject: Open, variant: Variant, update: int, *, folder: Path | None = None) -> UpdateTrace:
    """The trace of one update of a variant, which goes on from the checkpoint in `folder` if there is one."""
    tracers: list[Tracer] = []
    samples: list[list[Sequence[int]]] = []

    def hooks(subject: Subject) -> Sequence[Hook]:
        tracers.append(Tracer(subject, update))
        return tracers

    def note(batch: GlobalBatch) -> None:
        samples.append([one.samples for one in batch.microbatches])

    run_once(open_subject, variant, updates=update, hooks=hooks, folder=folder, data=lambda data: through(data, note))
    trace = tracers[0].made
    if folder is None and len(samples) >= update and len(samples[update - 1]) == len(trace.microbatches):
        for microbatch, numbers in zip(trace.microbatches, samples[update - 1], strict=True):
            microbatch.samples = numbers
    return trace


def difference_of_variants(open_subject: Open, one: Variant, other: Variant, *, updates: int) -> list[str]:
    """The first difference of two variants, update after update; [] where none was found."""

    def elsewhere(update: int) -> UpdateTrace:
        return traced(open_subject, other, update)

    return difference_of_runs(open_subject, one, elsewhere, updates=updates, exact=one.cut == other.cut)


def difference_of_runs(
    open_subject: Open, variant: Variant, elsewhere: Callable[[int], UpdateTrace], *, updates: int, exact: bool
) -> list[str]:
    """The first difference between a run here and one elsewhere, whose updates `elsewhere` traces.

    Args:
        exact: whether the runs must have the same bits; else they are the same up to rounding.
    """
    for update in range(1, updates + 1):
        here, there = traced(open_subject, variant, update), elsewhere(update)
        if found := first_difference(here, there, exact=exact):
            states = _states(here.states, there.states) if exact else ""
            return [f"update {update}: {found}", *([states] if states else [])]
    return []


def difference_of_resume(open_subject: Open, variant: Variant, *, stop_after: int, updates: int) -> list[str]:
    """The first difference of a run resumed after `stop_after` updates, and the state that it has lost."""
    states = ""
    for update in range(stop_after + 1, updates + 1):
        with tempfile.TemporaryDirectory() as name:
            run_once(open_subject, variant, updates=stop_after, folder=Path(name))
            whole = traced(open_subject, variant, update)
            resumed = traced(open_subject, variant, update, folder=Path(name))
        states = _states(whole.states, resumed.states)
        if found := first_difference(whole, resumed, exact=True):
            return [f"update {update}, resumed after {stop_after}: {found}", *([states] if states else [])]
    return [states] if states else []


def first_difference(one: UpdateTrace, other: UpdateTrace, *, exact: bool) -> str:
    """The first part of an update that differs, as a clause; "" if none does."""
    if name := worst(one.begin, other.begin, exact=exact):
        return f"parameter `{name}` is the first that differs, before the forward"
    for task in dict.fromkeys(microbatch.task for microbatch in one.microbatches):
        mine, theirs = ([each for each in trace.microbatches if each.task == task] for trace in (one, other))
        if found := _in_microbatches(mine, theirs, exact=exact):
            return f"{found} (task `{task}`)" if task else found
    if name := worst(one.gradient, other.gradient, exact=exact):
        return f"the gradient of `{name}` is the first that differs, after the same losses"
    if name := worst(one.end, other.end, exact=exact):
        return f"the step of `{name}` is the first that differs, after the same gradient"
    return ""


def _in_microbatches(one: Sequence[MicrobatchTrace], other: Sequence[MicrobatchTrace], *, exact: bool) -> str:
    order = order_of(one, other)

    def differs(part: Callable[[MicrobatchTrace], Values]) -> str | None:
        return apart([part(each) for each in one], [part(each) for each in other], order, exact=exact)

    if (path := differs(lambda each: each.batch)) is not None:
        return f"the batch is the first that differs{_at(path)}: the data set or `collate` makes other values"
    if (path := differs(lambda each: each.transformed)) is not None:
        return f"`transform` is the first that differs{_at(path)}"
    for key in one[0].calls:
        if not all(key in each.calls for each in (*one, *other)):
            continue
        same_inputs = differs(lambda each, key=key: each.calls[key].given) is None
        if same_inputs and differs(lambda each, key=key: each.calls[key].gave) is not None:
            name = f"module `{key[0]}`" if key[0] else "the model"
            return f"{name} is the first that differs, for the same inputs"
    if (path := differs(lambda each: each.output)) is not None:
        return f"the output is the first that differs{_at(path)}"
    for part in ("weight", "loss"):
        totals = [sum(getattr(each, part) or 0.0 for each in microbatches) for microbatches in (one, other)]
        if abs(totals[0] - totals[1]) > (0 if exact else _CLOSE * abs(totals[0])):
            return f"the {part} is the first that differs: {totals[0]:.6g} and {totals[1]:.6g} in sum"
    return ""


def _at(path: str) -> str:
    return f" at `{path}`" if path else ""


def _states(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    paths = [path for path in {**one, **other} if one.get(path) != other.get(path)]
    shown = first_of([f"`{path}`" for path in paths], _MOST_STATES)
    return f"state that differs when the update begins: {shown}" if paths else ""
