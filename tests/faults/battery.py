"""The battery: every fault, where it strikes, and what must come of it.

A case raises AssertionError when something else comes of it. Slow ones start processes; `make faults` runs all.
"""

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from injector import Fault, Points, cpu_out_of_memory, memory_error, out_of_memory, raised
from processes import run
from redo import CHECKS as REDONE
from runs import UPDATES, Ended, train
from torch import Tensor

import evenstep
from evenstep import Failures, MapData, Reading
from evenstep.errors import DataError, LostRankError, NonFiniteError, OutOfMemoryError
from evenstep.events import JsonlWriter, Save
from evenstep.parallel import Group
from evenstep.precision import Fp16Mixed
from evenstep.train import FailurePolicy
from threads import ends_of_ranks

EXACT, ROUNDED = 0.0, 1e-13  # the same bits; up to the rounding of sums in float64


class Case(NamedTuple):
    """One fault: its kind, place, rank and strategy; what injects it and looks at what comes of it."""

    name: str
    check: Callable[[], None]
    slow: bool = False  # starts processes


CASES: list[Case] = []


def case(name: str, *, slow: bool = False, into: list[Case] = CASES) -> Callable[[Callable[[], None]], None]:
    def add(check: Callable[[], None]) -> None:
        into.append(Case(name, check, slow))

    return add


def add(name: str, check: Callable[..., None], *arguments: Any, slow: bool = False, **named: Any) -> None:
    CASES.append(Case(name, partial(check, *arguments, **named), slow))


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def ends_of(ranks: int, act: Callable[[Group], Ended]) -> list[Ended]:
    """How all ranks of a run ended; errors are in it."""
    ends = [act(Group())] if ranks == 1 else ends_of_ranks(ranks, act)
    for end in ends:
        if isinstance(end, Exception):
            raise AssertionError(f"a rank raised {type(end).__name__}: {end}") from end
    return ends


def good(ended: Ended) -> Ended:
    if ended.error is not None:
        raise AssertionError(f"a rank ended with {type(ended.error).__name__}: {ended.error}") from ended.error
    return ended


def good_ends(ranks: int, act: Callable[[Group], Ended]) -> list[Ended]:
    return [good(ended) for ended in ends_of(ranks, act)]


@cache
def undisturbed(ranks: int = 1, **more: Any) -> list[Tensor]:
    return [end.parameters for end in good_ends(ranks, lambda group: train(group, **more))]


def same(ended: Ended, wanted: Tensor | None = None, bound: float = EXACT) -> None:
    wanted = undisturbed()[0] if wanted is None else wanted
    difference = float((ended.parameters - wanted).abs().max())
    assert difference <= bound, f"the parameters differ by {difference:g}, which must be at most {bound:g}"


def failed(ended: Ended, kind: Any, words: str = "", update: int = -1) -> None:
    assert isinstance(ended.error, kind), f"must end with {kind}, but with {ended.error!r}"
    assert words in str(ended.error), f"`{words}` must stand in: {ended.error}"
    assert update in (-1, ended.update), f"must end at update {update}, but at {ended.update}"


# Out of memory: in each phase, with each strategy, in stages; the update has the same gradient.

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and what they are given
    "single": (1, {}),
    "ordered": (2, {"strategy": "ordered"}),
    "ddp": (2, {"strategy": "ddp-buckets"}),
    "zero1": (2, {"strategy": "zero1"}),
    "pipeline": (2, {"pipeline": 2}),
    "pipelines, ddp": (4, {"pipeline": 2, "strategy": "ddp-buckets"}),
    "pipelines, ordered, zb_h1": (4, {"pipeline": 2, "strategy": "ordered", "schedule": "zb_h1"}),
    "pipelines, zero1": (4, {"pipeline": 2, "strategy": "zero1-ordered"}),
}


def memory(layout: str, phase: str, rank: int | None, act: Any = out_of_memory, times: int = 1) -> None:
    ranks, what = LAYOUTS[layout]
    fault = Fault(act=act, phase=phase, update=3, rank=rank, times=times)
    ends = good_ends(ranks, lambda group: train(group, [fault], **what))
    assert fault.struck == times, "the fault did not strike"
    for ended, wanted in zip(ends, undisturbed(ranks, **what), strict=True):
        same(ended, wanted, ROUNDED)
        assert ended.update == UPDATES
    if "pipeline" not in what:
        assert all(torch.equal(ended.parameters, ends[0].parameters) for ended in ends), "the replicas differ"
    assert "out_of_memory" in ends[0].kinds, "the first rank must hear of it"


for layout, (number, phase) in itertools.product(LAYOUTS, enumerate(("transfer", "forward", "backward", "armed"))):
    rank = number % LAYOUTS[layout][0]
    add(f"out of memory: {phase}, rank {rank}, {layout}", memory, layout, phase, rank)
add("out of memory on the CPU: forward", memory, "single", "forward", 0, cpu_out_of_memory)
add("out of memory of Python: backward", memory, "single", "backward", 0, memory_error)
add("out of memory: twice in a row", memory, "single", "forward", 0, times=2)
add("out of memory: twice, being reduced", memory, "ddp", "armed", 1, times=2)
add("out of memory: twice in a row, in a stage", memory, "pipeline", "backward", 1, times=2)
add("out of memory: both ranks", memory, "ddp", "forward", None, times=2)


def auto(layout: str) -> None:
    """The first updates find a size that fits, which is one sample."""
    ranks, what = LAYOUTS[layout]
    fault = Fault(act=out_of_memory, phase="backward", rank=None, times=None, larger_than=1)
    ends = good_ends(ranks, lambda group: train(group, [fault], micro=4, **what))
    assert fault.struck > 1, "four samples and then two must be tried"
    for ended, wanted in zip(ends, undisturbed(ranks, micro=1, **what), strict=True):
        same(ended, wanted, ROUNDED)
    assert {*ends[0].kinds} == {"out_of_memory"}


for layout in ("single", "pipeline", "pipelines, zero1"):
    add(f"micro-batch size auto: {layout}", auto, layout)


@case("out of memory: above one sample, always; the finer cut is remembered and saved")
def _() -> None:
    with folder() as where:
        fault = Fault(act=out_of_memory, phase="forward", times=None, larger_than=1)
        same(good(train(None, [fault], folder=where)), bound=ROUNDED)
        assert fault.struck == 2, f"four samples, then two must be tried once each, but {fault.struck} were"
        again = good(train(None, [fault], folder=where, updates=UPDATES + 2, resume=True))
        assert fault.struck == 2, "the cut must be read from the checkpoint"
        same(again, undisturbed(updates=UPDATES + 2)[0], ROUNDED)


def one_sample(ranks: int = 2, **what: Any) -> None:
    fault = Fault(act=out_of_memory, phase="forward", update=3, rank=ranks - 1, times=None)
    *others, last = ends_of(ranks, lambda group: train(group, [fault], **what))
    failed(last, OutOfMemoryError, update=2)
    for other in others:
        failed(other, LostRankError, "rank 1 failed", update=2)


add("out of memory: one sample, which can't be cut", one_sample, 1)
add("out of memory: one sample, on one rank of two", one_sample, strategy="ddp")
add("out of memory: one sample, in a stage", one_sample, pipeline=2)


@case("out of memory: policy stop")
def _() -> None:
    fault = Fault(act=out_of_memory, phase="backward", update=3)
    failed(train(None, [fault], failures=Failures(out_of_memory="stop")), OutOfMemoryError)


@case("out of memory: BatchNorm's statistics are those of the try that counted")
def _() -> None:
    ended, cut = (
        good(train(None, [Fault(act=out_of_memory, phase=phase, update=3)], norm=True))
        for phase in ("backward", "transfer")
    )
    same(ended, cut.parameters)
    assert all(torch.equal(a, b) for a, b in zip(ended.buffers, cut.buffers, strict=True))


def in_evaluation(**what: Any) -> None:
    points = MapData(Points(10), global_batch_size=5, micro_batch_size=5, shuffle=False)
    ranks, more = what.get("pipeline", 1), {"evaluations": {"valid": points}, "check_loss": False, **what}
    fault = Fault(act=out_of_memory, phase="evaluate", rank=ranks - 1)
    wanted, ends = (good_ends(ranks, lambda group, f=faults: train(group, f, **more)) for faults in ([], [fault]))
    values = [one[0].trainer.storage.latest("valid/loss").value for one in (wanted, ends)]  # type: ignore[union-attr]
    assert abs(values[0] - values[1]) < ROUNDED and fault.struck == 1
    for ended, undisturbed_end in zip(ends, wanted, strict=True):
        same(ended, undisturbed_end.parameters)


add("out of memory: evaluation", in_evaluation)
add("out of memory: evaluation, in a stage", in_evaluation, pipeline=2)


# Numbers that are not finite, and losses that jump.


class Poison(evenstep.Hook):
    """Makes a parameter's gradient NaN at one update, or spoils the parameters after one; `times` in all."""

    def __init__(self, update: int, *, times: int = 1, after: bool = False) -> None:
        self.at, self.times, self.after = update, times, after

    def before_update(self, event: Any) -> None:
        self.handles = []
        if event.update == self.at and self.times and not self.after:
            self.times -= 1
            parameter = next(self.trainer.model.parameters())
            self.handles = [parameter.register_hook(lambda grad: grad * float("nan"))]

    def after_update(self, event: Any) -> None:
        for handle in self.handles:
            handle.remove()
        if self.after and event.update == self.at and event.committed and self.times:
            self.times -= 1
            with torch.no_grad():
                for parameter in self.trainer.model.parameters():
                    parameter.mul_(100)


def nan(times: int, answer: Any, update: int) -> None:
    """A run that stops at an update, or ends at the same bits."""
    ended = train(hooks=[Poison(4, times=times)], failures=Failures(non_finite=answer))
    same(good(ended)) if update == UPDATES else failed(ended, NonFiniteError, "update 4", update=update)


add("NaN gradient: stop, at the last committed update", nan, 1, "stop", 3)
add("NaN gradient, passing: retry ends at the same bits", nan, 1, "retry", UPDATES)
add("NaN gradient, lasting: retry stops", nan, 9, FailurePolicy("retry", limit=2), 3)


def nan_is_skipped(ranks: int, **what: Any) -> None:
    def act(group: Group) -> Ended:
        hooks = [Poison(4)] if group.rank == ranks - 1 else []
        return train(group, hooks=hooks, failures=Failures(non_finite="skip"), **what)

    ends = good_ends(ranks, act)
    for ended in ends:
        same(ended, ends[0].parameters)
        assert bool(ended.parameters.isfinite().all())
        assert (ended.trainer.progress.skipped, ended.update) == (1, UPDATES)


add("NaN gradient: skip gives the global batch up", nan_is_skipped, 1)
for strategy in ("ordered", "ddp", "zero1"):
    add(f"NaN gradient on rank 1 of 2: all skip the same, {strategy}", nan_is_skipped, 2, strategy=strategy)

SCALE, FLOOR, TRIES = 2.0**10, 2.0**8, 3


def nan_in_16_mixed(ranks: int, **more: Any) -> None:
    def act(group: Group) -> Ended:
        hooks = [Poison(4, times=TRIES)] if group.rank == ranks - 1 else []
        precision = Fp16Mixed(initial=SCALE, floor=FLOOR)
        return train(group, hooks=hooks, precision=precision, failures=Failures(non_finite="skip"), **more)

    for ended in good_ends(ranks, act):
        kinds = ["overflow"] * (TRIES - 1) + ["non_finite"]
        assert ended.kinds == kinds, f"one batch must be given up at the lowest scale, but there were {ended.kinds}"
        assert (ended.trainer.progress.skipped, ended.update) == (1, UPDATES)
        assert ended.trainer.storage.history("train/loss_scale")[-1].value == SCALE


add("16-mixed, a bad batch: given up at the lowest scale", nan_in_16_mixed, 1)
add("16-mixed, a bad batch on rank 1 of 2: all give it up, ddp", nan_in_16_mixed, 2, strategy="ddp")
add("16-mixed, a bad batch in stage 1 of 2: all give it up", nan_in_16_mixed, 2, pipeline=2)


@case("16-mixed, a bad batch: stop, and the checkpoint has the loss scale of before")
def _() -> None:
    with folder() as where:
        scaled = {"precision": Fp16Mixed(initial=SCALE, floor=FLOOR)}
        failed(train(hooks=[Poison(4, times=TRIES)], folder=where, **scaled), NonFiniteError, update=3)
        again = good(train(precision=Fp16Mixed(initial=1.0), folder=where, resume=True, new_settings=True))
        assert again.trainer.state_dict()["precision"]["scale"] == SCALE
        same(again, good(train(**scaled)).parameters)


@case("NaN made on rank 1 of 2: both stop at the last committed update")
def _() -> None:
    ends = ends_of(2, lambda group: train(group, hooks=[Poison(4)] if group.rank else [], strategy="ddp"))
    assert any(isinstance(ended.error, NonFiniteError) for ended in ends)
    for ended in ends:  # the one that is slower may hear it of the other
        failed(ended, (NonFiniteError, LostRankError), update=3)


@case("NaN in a sample: stop names the micro-batch")
def _() -> None:
    def collate(samples: list[Any]) -> Any:
        point, wanted, weight = torch.utils.data.default_collate(samples)
        return torch.where(weight[:, None] == 2, point * float("nan"), point), wanted, weight

    failed(train(data={"collate": collate}), NonFiniteError, "1, 2", update=0)


def rewound(ranks: int, strategy: str) -> None:
    with folder() as where:

        def act(group: Group) -> Ended:
            hooks, failures = [Poison(5), Save(every_updates=2)], Failures(non_finite="rewind")
            more: dict[str, Any] = {"folder": where, "failures": failures, "writers": [JsonlWriter()]}
            return train(group, strategy=strategy, hooks=hooks, **more)

        for ended, wanted in zip(good_ends(ranks, act), undisturbed(ranks, strategy=strategy), strict=True):
            same(ended, wanted)
            assert "rewind" in ended.kinds
        updates = [json.loads(line)["update"] for line in Path(where, "metrics.jsonl").read_text().splitlines()]
        assert updates == list(range(1, UPDATES + 1)), "each update's metrics once"


for ranks, strategy in ((1, "single"), (2, "ordered"), (2, "ddp")):
    add(f"NaN gradient, passing: rewind ends at the same bits, {strategy}", rewound, ranks, strategy)


@case("NaN gradient: rewind without a sound checkpoint before it stops")
def _() -> None:
    with folder() as where:
        failures = Failures(non_finite="rewind", max_rewinds=1)
        failed(train(hooks=[Poison(3, times=9)], folder=where, failures=failures), NonFiniteError, update=2)


def spiked(at: int, answer: Any = "report", **more: Any) -> Ended:
    with folder() as where:
        failures = Failures(loss_spike=answer, spike_window_updates=16, spike_threshold=20)
        hooks = [Poison(at, after=True), Save(every_updates=3)]
        return train(hooks=hooks, folder=where, failures=failures, updates=20, **more)


@case("loss spike: rewind past the data that caused it")
def _() -> None:
    ended = good(spiked(13, "rewind_past", clip_norm=None))
    assert ended.kinds == ["loss_spike", "rewind"], ended.kinds
    assert (ended.trainer.progress.skipped, ended.update) == (2, 20)  # from update 12 to the batch of update 14


def spike_is_undone(at: int, rewinds: int) -> None:
    ended = good(spiked(at, "rewind"))
    assert ended.kinds == ["loss_spike", "rewind"] * rewinds, ended.kinds
    same(ended, undisturbed(updates=20)[0])


add("loss spike, passing: rewind ends at the same bits", spike_is_undone, 13, 1)
add("loss spike: the newest checkpoint is spoiled too, and the second rewind goes further back", spike_is_undone, 12, 2)


@case("loss spike: policy stop, and a spike that is only reported")
def _() -> None:
    failed(spiked(13, "stop"), NonFiniteError, "update 14")
    assert "loss_spike" in good(spiked(13)).kinds


# Data.


def corrupt(sample: int) -> None:
    if sample == 7:
        raise ValueError("corrupt")


def left_out(ranks: int, strategy: str, micro: int) -> None:
    reading = {"reading": Reading(retries=1, skip_failing=True)}

    def act(group: Group, **what: Any) -> Ended:
        return train(group, fail=corrupt, data=reading, **what)

    ends, one = good_ends(ranks, partial(act, strategy=strategy, micro=micro)), good(act(Group(), micro=8))
    same(ends[0], one.parameters, ROUNDED)
    counts = {end.trainer.progress.samples for end in ends}
    assert counts == {UPDATES * 16 - 2}, f"{counts}: sample 7 is in 2 epochs"
    assert any("loader" in end.kinds for end in ends)


for ranks, strategy, micro in ((1, "single", 4), (2, "ordered", 4), (2, "ddp", 2)):
    add(f"a sample that can't be read: left out with its weight, {strategy}", left_out, ranks, strategy, micro)


@case("a sample that can't be read, on one rank: the other stops and says why")
def _() -> None:
    ends = ends_of(2, lambda group: train(group, fail=corrupt, strategy="ddp"))
    assert {type(end.error) for end in ends} == {DataError, LostRankError}


@case("too many samples that can't be read: stop")
def _() -> None:
    reading = {"reading": Reading(retries=0, skip_failing=True)}
    failed(train(fail=corrupt, data=reading, failures=Failures(max_skipped_samples=1)), DataError)


@case("a sample of another shape: collate is named")
def _() -> None:
    def collate(samples: list[Any]) -> Any:
        if any(float(sample[2]) == 2.0 for sample in samples):
            raise RuntimeError("stack expects each tensor to be equal size")
        return torch.utils.data.default_collate(samples)

    failed(train(data={"collate": collate}), DataError, "`collate`")


# Hooks and folders.


class Bad(evenstep.Hook):
    """Raises in one of its methods."""

    def __init__(self, method: str, *, on_error: Any = None) -> None:
        self.failure_policy = on_error
        setattr(self, method, self._fail)
        self._always = method in ("after_train", "before_save", "before_evaluate")

    def _fail(self, event: Any) -> None:
        if self._always or event.update == 3:
            raised()


METHODS = ("before_update", "after_update", "after_train", "before_save", "before_evaluate")
for method in METHODS:
    setattr(Bad, method, lambda self, event: None)


def hook_continues(method: str) -> None:
    with folder() as where:
        points = MapData(Points(10), global_batch_size=5, micro_batch_size=5, shuffle=False)
        ended = good(train(hooks=[Bad(method, on_error="continue")], folder=where, evaluations={"valid": points}))
    same(ended)
    assert "hook" in ended.kinds


for method in METHODS:
    add(f"a hook raises in {method}: continue", hook_continues, method)


@case("a hook raises on one rank: the other stops and says why")
def _() -> None:
    def act(group: Group) -> Ended:
        return train(group, hooks=[Bad("before_update")] if group.rank == 1 else [], strategy="ordered")

    first, second = ends_of(2, act)
    failed(second, ValueError)
    failed(first, LostRankError, "rank 1 failed: ValueError")


@case("the run folder is deleted while training: the run goes on")
def _() -> None:
    with folder() as base:

        class Delete(evenstep.Hook):
            def after_update(self, event: Any) -> None:
                if event.update == 3:
                    shutil.rmtree(base / "run")

        same(good(train(hooks=[Delete()], folder=base / "run", writers=[JsonlWriter()])))


# Errors that a run goes on from.


def resumed(ranks: int, where: Path, **what: Any) -> None:
    ends = good_ends(ranks, lambda group: train(group, folder=where, resume=True, **what))
    for ended, wanted in zip(ends, undisturbed(ranks, **what), strict=True):
        same(ended, wanted)


def resumed_from_the_last_save(layout: str) -> None:
    """An error on the last rank: no rank holds the whole state, so the run goes on from the last save, bit for bit."""
    ranks, what = LAYOUTS[layout]
    fault = Fault(act=raised, phase="forward", update=4, rank=ranks - 1)
    with folder() as where:

        def act(group: Group) -> Ended:
            at_once = evenstep.Checkpointing(every_updates=2, asynchronous=False)
            return train(group, [fault], folder=where, checkpoint=at_once, **what)

        ends = ends_of(ranks, act)
        assert [ended.update for ended in ends] == [3] * ranks
        assert [path.name for path in Path(where, "checkpoints").iterdir()] == ["step-00000002"], ends
        resumed(ranks, where, **what)


for layout in ("zero1", "pipeline", "pipelines, zero1"):
    add(f"error on one rank, resumed: {layout}", resumed_from_the_last_save, layout)


# Processes.


@cache
def undisturbed_processes(ranks: int, strategy: str = "ordered") -> str:
    with folder() as where:
        return str(run(ranks, folder=str(where), strategy=strategy)[0].said["sha256"])


def process_lost(
    kind: str, rank: int, *, words: str, ranks: int = 2, strategy: str = "ordered", phase: str = "forward", **what: Any
) -> None:
    """The other ranks say who is missing; the run resumes, and ends at the bits of the undisturbed one."""
    with folder() as where:
        fault = {"fault": kind, "at": [rank, 4, phase], "frozen": (rank,) if kind == "freeze" else ()}
        ends = run(ranks, folder=str(where), strategy=strategy, **fault, **what)
        for other in ends[:rank] + ends[rank + 1 :]:
            assert other.code == 1, other
            assert words in other.said["error"], other.said["error"]
            waited_s = other.seconds - ends[rank].seconds  # below 0 where the lost one ended by its watchdog, or never
            assert waited_s < 20, f"the other rank ended {waited_s:.0f} s after the lost one"
        assert list(Path(where, "incidents").glob("*lost_rank*")), "with the last collectives"
        again = run(ranks, folder=str(where), strategy=strategy, resume=True)
        assert [end.code for end in again] == [0] * ranks, again
        assert again[0].said["sha256"] == undisturbed_processes(ranks, strategy)


SLOW_S = {"timeout_s": 6, "watch_s": 14}
LOST: list[tuple[str, int, dict[str, Any]]] = [
    ("kill", 1, {}),
    ("kill", 0, {}),
    ("kill", 2, {"ranks": 3}),
    ("segfault", 1, {}),
    ("exit", 1, {}),
    ("raise", 0, {}),
    ("raise", 1, {}),
    ("raise", 0, {"ranks": 3}),
    ("sys_exit", 1, {}),
    ("freeze", 1, {"timeout_s": 6}),
    ("freeze", 0, {"timeout_s": 6}),
    ("late", 1, {"timeout_s": 4}),  # 100 times as long as an update takes
    ("deadlock", 1, SLOW_S),
    ("deadlock", 1, {**SLOW_S, "phase": "before_update"}),  # in a hook
    ("hold", 1, SLOW_S),  # Python's lock, for ever
    *(("kill", 1, {"strategy": strategy}) for strategy in ("ddp", "zero1", "fsdp", "ordered-fsdp")),
    *(("raise", rank, {"strategy": "fsdp"}) for rank in (0, 1)),
    ("freeze", 1, {"strategy": "fsdp", "timeout_s": 6}),
]
for kind, rank, what in LOST:
    where = [f"rank {rank} of {what.get('ranks', 2)}", *(what[key] for key in ("strategy", "phase") if key in what)]
    add(", ".join([kind, *where]), process_lost, kind, rank, words=f"rank {rank}", slow=True, **what)


def process_stops(kind: str, rank: int, ranks: int) -> None:
    with folder() as where:
        ends = run(ranks, folder=str(where), strategy="ordered", fault=kind, at=[rank, 3, "before_update"])
        assert [(end.code, end.said["update"]) for end in ends] == [(0, 3)] * ranks, ends
        again = run(ranks, folder=str(where), strategy="ordered", resume=True)
        assert again[0].said["sha256"] == undisturbed_processes(ranks)


add("SIGTERM, one process", process_stops, "terminate", 0, 1, slow=True)
add("SIGTERM, rank 1 of 2: both stop", process_stops, "terminate", 1, 2, slow=True)
add("SIGUSR1, rank 0 of 2: both stop", process_stops, "user1", 0, 2, slow=True)


def ends_as_it_would(kind: str, update: int | None) -> None:
    with folder() as where:
        ends = run(2, folder=str(where), strategy="ordered", fault=kind, at=[1, update, "forward"])
        assert [(end.code, end.said["sha256"]) for end in ends] == [(0, undisturbed_processes(2))] * 2, ends


add("SIGSTOP, and SIGCONT in time, rank 1 of 2", ends_as_it_would, "pause", 4, slow=True)
add("a slow rank: the run ends as it would", ends_as_it_would, "slow", None, slow=True)
CASES += [Case(*one) for one in REDONE]


def limited(check: Callable[[], None], limit_s: float) -> float:
    """Run a check; gives its seconds, which must stay below the limit: nothing may hang."""
    began = time.monotonic()
    check()
    seconds = time.monotonic() - began
    assert seconds < limit_s, f"took {seconds:.0f} s"
    return seconds
