"""Names what a row fails by: the part of the run whose work depends on the cut, or is lost when it is resumed.

Two traces of one update, with the same parameters, are held against each other from the data on: batches, transforms,
module by module, output, loss, weight, gradients, steps. The first point at which they differ is said, with what was
seen there beside: buffers that move, generators that are drawn from, hooks on parameters.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from evenstep.data import GlobalBatch
from evenstep.events import Hook
from evenstep.extras.prove.compare import distance
from evenstep.extras.prove.runs import Through, run_once
from evenstep.extras.prove.subject import Subject, Variant
from evenstep.extras.prove.trace import ModuleCall, Passage, Trace, Traced, Values
from evenstep.internals import has_backward_hooks, has_gradient_hooks

Across = Literal["cuts", "runs", "ranks"]  # what two traces differ in
Open = Callable[[Variant], AbstractContextManager[Subject]]

_APART = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOST = 5
_BY_RANK = "it goes by the rank, or by how many there are (`RANK`, `WORLD_SIZE`, `torch.distributed`)"
_OF_MICROBATCHES = tuple(name for name in vars(Hook) if name.endswith(("_microbatch", "_forward", "_backward")))
_OF_BATCH = "the batch holds other values for the same samples"


def traced(
    open_subject: Open, variant: Variant, update: int, *, folder: Path | None = None
) -> tuple[Trace, Sequence[str], dict[str, str]]:
    """The trace of an update of a run, what the engine has said, and the classes and hooks of the model, in words."""
    made: list[Trace] = []
    samples: list[list[Sequence[int]]] = []
    about: dict[str, str] = {}

    def hooks(subject: Subject) -> Sequence[Hook]:
        made.append(Trace(subject, update))
        about.update(_about(subject))
        return made

    def note(batch: GlobalBatch) -> None:
        samples.append([one.samples for one in batch.microbatches])

    ended = run_once(
        open_subject, variant, updates=update, hooks=hooks, folder=folder, data=lambda data: Through(data, note)
    )
    trace = made[0]
    if folder is None and len(samples) >= update and len(samples[update - 1]) == len(trace.made.passages):
        for passage, numbers in zip(trace.made.passages, samples[update - 1], strict=True):
            passage.samples = numbers
    return trace, ended.said, about


def causes_of_cut(open_subject: Open, one: Variant, other: Variant, *, updates: int) -> list[str]:
    """What makes two variants of a run differ, in sentences; none where it was not found.

    Args:
        updates: how many to look at, one after the other.
    """
    said: Sequence[str] = ()
    kept: list[str] = []
    for update in range(1, updates + 1):
        (whole, _, about), (cut, said, _) = traced(open_subject, one, update), traced(open_subject, other, update)
        found = first_difference(whole.made, cut.made, about, across="runs" if one.cut == other.cut else "cuts")
        if found:
            return [found, *_kept(cut), *_new(said, found)]
        kept = kept or [
            way for way in cut.moved if way.startswith("model.") and cut.states[1][way] != whole.states[1].get(way)
        ]
    if kept:
        return [f"forwards keep other values of each micro-batch in {listed(kept)}, though all else is the same", *said]
    return list(said)


def causes_of_ranks(
    open_subject: Open, variant: Variant, elsewhere: Callable[[int], Traced], *, updates: int
) -> list[str]:
    """What makes a run on several ranks another than on one, in sentences; none where it was not found.

    Args:
        variant: of the run in one process.
        elsewhere: gives the trace of an update on all ranks.
    """
    for update in range(1, updates + 1):
        trace, _, about = traced(open_subject, variant, update)
        if found := first_difference(trace.made, elsewhere(update), about, across="ranks"):
            return [found]
    return []


def causes_of_resume(open_subject: Open, variant: Variant, *, stop_after: int) -> list[str]:
    """What a run that goes on from a checkpoint after so many updates has lost, in sentences."""
    update, said = stop_after + 1, list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_once(open_subject, variant, updates=stop_after, folder=folder)
        (whole, heard, about), (resumed, _, _) = (
            traced(open_subject, variant, update),
            traced(open_subject, variant, update, folder=folder),
        )
    found = first_difference(whole.made, resumed.made, about, across="runs")
    of_data = found.startswith(_OF_BATCH)
    kept = resumed.states[0]
    lost = [way for way, state in whole.states[0].items() if kept.get(way) != state]
    lost = [way for way in lost if way.startswith("data") == of_data or way.startswith("collate")]
    own = [way for way in lost if way in whole.moved or way not in kept or of_data] or lost
    if own:
        said.append(
            f"these are other after a resume than they were, since no checkpoint holds them: {listed(own)}; keep them "
            f"in buffers, or in the `state_dict` of what they belong to"
        )
    return [*said, *([found] if found and (of_data or not own) else []), *heard]


def _new(said: Sequence[str], found: str) -> list[str]:
    return [one for one in said if one not in found]


def _kept(trace: Trace) -> list[str]:
    """What moved in the update that nobody keeps equal between cuts."""
    ways = [way for way in trace.moved if not way.startswith(("optimizer", "data", "lr_schedule"))]
    if not ways:
        return []
    return [f"in that update these changed as well, and so with every micro-batch: {listed(ways)}"]


def listed(names: Sequence[str]) -> str:
    """Names in a sentence; the first few of many."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(f'`{name}`' for name in names[:_MOST])}{more}"


def _about(subject: Subject) -> dict[str, str]:
    """The classes of modules and tasks, and hooks on parameters."""
    found = {f"module {name}": type(module).__name__ for name, module in subject.model.named_modules()}
    found |= {f"task {name}": type(task).__name__ for name, task in subject.tasks.items()}
    each = [
        f"{hook.name}.{moment}"
        for hook in subject.hooks
        for moment in _OF_MICROBATCHES
        if getattr(type(hook), moment) is not getattr(Hook, moment)
    ]
    if each:
        found["hooks"] = f"a hook that is called for each micro-batch ({listed(each)})"
    for name, one in subject.model.named_parameters():
        if has_gradient_hooks(one):
            found[f"hook {name}"] = (
                "it has a hook of its own (`register_hook`), which sees the gradient of a micro-batch"
            )
    for name, module in subject.model.named_modules():
        if has_backward_hooks(module):
            found[f"hook {name}."] = f"module `{name}` has a backward hook, which sees gradients of a micro-batch"
    return found


def first_difference(one: Traced, other: Traced, about: Mapping[str, str], *, across: Across) -> str:
    """Where two traces of one update part, in a sentence; "" where they do not."""
    start = _worst(one.begin, other.begin, exact=across == "runs")
    if start:
        return (
            f"parameter `{start}` is another from the beginning: it is drawn from something that `seed` does not seed "
            f"(time, `os.urandom`, a generator without a seed)"
        )
    if moved := _moved_between(one.passages, other.passages):
        return (
            f"parameters change between the micro-batches of one update: {listed(moved)}. A forward or "
            f"{_by_hooks(about)} writes to them; only the optimizer may, once per update"
        )
    for task in dict.fromkeys(passage.task for passage in one.passages):
        mine, theirs = ([each for each in trace.passages if each.task == task] for trace in (one, other))
        found = _in_passages(mine, theirs, about, across=across)
        if found:
            return found
    gradient = _worst(one.gradient, other.gradient, exact=across == "runs")
    if gradient:
        of_modules = [text for key, text in about.items() if key.endswith(".") and f"hook {gradient}".startswith(key)]
        hook = about.get(f"hook {gradient}") or next(iter(of_modules), "")
        return (
            f"the gradient of `{gradient}` differs though all outputs and losses are the same: "
            f"{hook or f'{_by_hooks(about)}, or an autograd function of its own, changes it on its way'}"
        )
    step = _worst(one.end, other.end, exact=across == "runs")
    if step:
        return (
            f"parameter `{step}` differs after the step though its gradient was the same: the optimizer, the LR "
            f"schedule or {_by_hooks(about)} steps it by something else (a rate that each micro-batch changes, state "
            f"that is not in `state_dict`, time, an own count)"
        )
    return ""


def _moved_between(*traces: Sequence[Passage]) -> list[str]:
    """Parameters that are others in a later micro-batch than in the first, of one process."""
    found = {
        name
        for passages in traces
        for each in passages
        for name, value in each.parameters.items()
        if passages[0].parameters.get(name) != value
    }
    return sorted(found)


def _by_hooks(about: Mapping[str, str]) -> str:
    """What to look at where a hook may have done it: those of the user that are called for each micro-batch."""
    return about.get("hooks") or "a hook"


def _in_passages(one: Sequence[Passage], other: Sequence[Passage], about: Mapping[str, str], *, across: Across) -> str:
    order = _order(one, other)
    kind = about.get(f"task {one[0].task}", "Task")

    def differs(values: Callable[[Passage], Values]) -> str | None:
        return _apart([values(each) for each in one], [values(each) for each in other], order, exact=across == "runs")

    way = differs(lambda each: each.batch)
    if way is not None:
        return (
            f"{_OF_BATCH}{_at(way)}: the dataset or its `collate` draws random numbers for a micro-batch, looks at all "
            f"samples of one, or keeps something from one to the next"
        )
    way = differs(lambda each: each.transformed)
    if way is not None:
        return f"`{kind}.transform` gives other values for the same samples{_at(way)}"
    found = _in_modules(one, other, about, order, across=across)
    if found:
        return found
    if differs(lambda each: each.output) is not None:
        return f"`{kind}.postprocess`, or what the model does outside of its modules, gives other values"
    weights = [[each.weight or 0.0 for each in passages] for passages in (one, other)]
    if None not in (each.weight for each in (*one, *other)) and not _equal(sum(weights[0]), sum(weights[1])):
        return (
            f"the weights of the micro-batches add up to {sum(weights[1]):g}, but the weight of the whole is "
            f"{sum(weights[0]):g}: `{kind}.weight` must count the units that the loss covers (padding is none)"
        )
    losses = [[each.loss or 0.0 for each in passages] for passages in (one, other)]
    if across == "ranks" and not _equal(sum(losses[0]), sum(losses[1])):
        return (
            f"the losses of all ranks add up to {sum(losses[1]):.6g}, but those of one process to "
            f"{sum(losses[0]):.6g}, though all outputs are the same: look at `{kind}.loss`; {_BY_RANK}"
        )
    if not _equal(sum(losses[0]), sum(losses[1])) or (across == "runs" and losses[0] != losses[1]):
        return (
            f"the losses of the micro-batches add up to {sum(losses[1]):.6g}, but the loss of the whole is "
            f"{sum(losses[0]):.6g}, though all outputs are the same: `{kind}.loss` is no sum over its units, or keeps "
            f"something from one micro-batch to the next"
        )
    return ""


def _in_modules(
    one: Sequence[Passage],
    other: Sequence[Passage],
    about: Mapping[str, str],
    order: list[int] | None,
    *,
    across: Across,
) -> str:
    for name, number in one[0].calls:
        mine, theirs = ([each.calls.get((name, number)) for each in passages] for passages in (one, other))
        if None in mine or None in theirs:
            continue
        calls, others = cast("list[ModuleCall]", mine), cast("list[ModuleCall]", theirs)
        if _apart([each.gave for each in calls], [each.gave for each in others], order, exact=across == "runs") is None:
            continue
        if (
            _apart([each.given for each in calls], [each.given for each in others], order, exact=across == "runs")
            is not None
        ):
            continue
        moved = dict.fromkeys(
            f"{inner}.{way}".lstrip(".")
            for passage in (*one, *other)
            for (inner, _), call in passage.calls.items()
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
    if drew:
        return f"{place} draws from {' and '.join(drew)}, which gives other numbers in another cut"
    if moved:
        return f"{place} goes by {listed(moved)}, which its forwards change from one micro-batch to the next"
    if across == "ranks":
        return f"{place} gives other outputs on several ranks than in one process: {_BY_RANK}"
    if across == "runs":
        return f"{place} gives other outputs for the same inputs: it goes by time, or by something that nobody seeds"
    return (
        f"{place} gives a sample another output in other company: it looks at the micro-batch as a whole (a mean over "
        f"samples, negatives of the same batch, padding that counts)"
    )


def _order(one: Sequence[Passage], other: Sequence[Passage]) -> list[int] | None:
    """Where each sample of the other trace is in the first one; None where they are not known."""
    mine = [number for passage in one for number in passage.samples]
    theirs = [number for passage in other for number in passage.samples]
    if not mine or len(set(mine)) != len(mine) or sorted(mine) != sorted(theirs):
        return None
    places = {number: place for place, number in enumerate(mine)}
    return [places[number] for number in theirs]


def _apart(one: Sequence[Values], other: Sequence[Values], order: list[int] | None, *, exact: bool) -> str | None:
    """The first place whose values differ; None where all that can be compared are the same."""
    for way in one[0]:
        if not all(way in each for each in (*one, *other)):
            continue
        if _differ([each[way] for each in one], [each[way] for each in other], order, exact=exact):
            return way
    return None


def _differ(one: list[Tensor], other: list[Tensor], order: list[int] | None, *, exact: bool) -> bool:
    if len(one) == len(other) and all(a.shape == b.shape for a, b in zip(one, other, strict=True)):
        return any(_far(a, b, exact=exact) for a, b in zip(one, other, strict=True))
    if exact or len(one) > 1 or len({each.ndim for each in (*one, *other)}) > 1:
        return False  # nothing that can be held against each other
    whole = one[0]
    for dim in range(min(2, whole.ndim)):
        sizes = [each.shape[dim] for each in other]
        if sum(sizes) != whole.shape[dim] or len(other) < 2:
            continue
        if order is not None and len(order) == whole.shape[dim]:
            whole = whole.index_select(dim, torch.tensor(order))
        begin = 0
        for size, part in zip(sizes, other, strict=True):
            mine = whole.narrow(dim, begin, size)
            begin += size
            common = tuple(slice(0, min(a, b)) for a, b in zip(mine.shape, part.shape, strict=True))
            if _far(mine[common], part[common], exact=exact):
                return True
        return False
    return False


def _far(one: Tensor, other: Tensor, *, exact: bool) -> bool:
    if exact or not one.is_floating_point():
        return not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    scale = max(float(one.double().norm()), 1e-30)
    return distance(torch.nan_to_num(one), torch.nan_to_num(other)) > _APART.get(one.dtype, 1e-2) * scale


def _worst(one: Values, other: Values, *, exact: bool) -> str:
    """The name of the tensor that differs most; "" where none does."""
    scale = sum(float(each.double().norm()) ** 2 for each in one.values()) ** 0.5 or 1.0
    worst, size = "", 0.0
    for name, value in one.items():
        if name not in other:
            continue
        apart = distance(value, other[name])
        far = apart > 0 if exact else apart > _APART.get(value.dtype, 1e-2) * scale
        if far and apart > size:
            worst, size = name, apart
    return worst


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other), 1e-30)


def _at(way: str) -> str:
    return f" at `{way}`" if way else ""
