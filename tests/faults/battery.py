"""The battery: every fault, where it strikes, and what must come of it.

A case raises AssertionError when something else comes of it. `SLOW` ones start processes; `make faults` runs all.
"""

import errno
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from divided import CHECKS
from equipped import CHECKS as EQUIPPED
from injector import (
    Fault,
    cpu_out_of_memory,
    cublas_out_of_memory,
    cuda_out_of_memory,
    memory_error,
    out_of_memory,
)
from processes import run
from redo import CHECKS as REDONE
from runs import UPDATES, Ended, train
from threads import on_ranks
from torch import Tensor

import evenstep
from evenstep import Failures, Reading
from evenstep.errors import (
    CheckpointError,
    DataError,
    EvenstepError,
    LostRankError,
    NonFiniteError,
    OutOfMemoryError,
    ReplicaError,
)
from evenstep.events import EvaluateEvent, JsonlWriter, Record, Save, SaveEvent, TimeBudget, UpdateEvent

EXACT, ROUNDED = 0.0, 1e-13  # the same bits; up to the rounding of sums in float64


@dataclass(frozen=True, slots=True)
class Case:
    """One fault.

    Args:
        name: kind, place, rank, strategy.
        check: injects it, and raises unless what must come of it does.
        slow: whether it starts processes, or others show the same.
    """

    name: str
    check: Callable[[], None]
    slow: bool = False


CASES: list[Case] = []


def case(
    name: str, *, slow: bool = False, into: list[Case] = CASES
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(check: Callable[[], None]) -> Callable[[], None]:
        into.append(Case(name, check, slow))
        return check

    return add


@cache
def undisturbed(strategy: str = "single", ranks: int = 1, norm: bool = False, updates: int = UPDATES) -> Tensor:
    ended = on_ranks(ranks, lambda group: train(group, strategy=strategy, norm=norm, updates=updates))
    return good(ended[0]).parameters


def good(ended: Ended | Exception) -> Ended:
    if isinstance(ended, Exception):
        raise AssertionError(f"a rank raised {type(ended).__name__}: {ended}") from ended
    if ended.error is not None:
        raise AssertionError(f"a rank ended with {type(ended.error).__name__}: {ended.error}") from ended.error
    return ended


def same(ended: Ended, wanted: Tensor, bound: float) -> None:
    difference = float((ended.parameters - wanted).abs().max())
    assert difference <= bound, f"the parameters differ by {difference:g}, which must be at most {bound:g}"


def failed(ended: Ended | Exception, kind: type[Exception] | tuple[type[Exception], ...], words: str) -> Exception:
    assert isinstance(ended, Ended), ended
    assert isinstance(ended.error, kind), f"must end with {kind}, but with {ended.error!r}"
    assert words in str(ended.error), f"`{words}` must stand in: {ended.error}"
    return ended.error


# Out of memory: in each phase, on each rank, with each strategy; the update has the same gradient.


def memory(phase: str, rank: int, strategy: str, ranks: int, act: Callable[[], object], **fault: Any) -> None:
    injected = Fault(act=act, phase=phase, update=3, rank=rank, **fault)
    ends = [good(end) for end in on_ranks(ranks, lambda group: train(group, [injected], strategy=strategy))]
    assert injected.struck, "the fault did not strike"
    for ended in ends:
        same(ended, undisturbed(strategy, ranks), ROUNDED)
        assert torch.equal(ended.parameters, ends[0].parameters), "the replicas differ"
        assert ended.update == UPDATES
    assert "out_of_memory" in ends[0].kinds, "the first rank must hear of it"


LAYOUTS = [("single", 1), ("ordered", 1), ("ordered", 2), ("ddp", 2), ("ddp-buckets", 2), ("zero1", 2)]
for strategy, ranks in LAYOUTS:
    for (number, phase), rank in itertools.product(
        enumerate(("transfer", "forward", "backward", "armed")), range(ranks)
    ):
        where = f"{phase}, rank {rank} of {ranks}, {strategy}"
        others_show_it = (number + rank) % ranks > 0  # each phase meets one of the ranks, and each rank two phases
        check = partial(memory, phase, rank, strategy, ranks, out_of_memory)
        CASES.append(Case(f"out of memory: {where}", check, others_show_it))
CASES += [
    Case("out of memory on the CPU: forward", partial(memory, "forward", 0, "single", 1, cpu_out_of_memory)),
    Case("out of memory of Python: backward", partial(memory, "backward", 0, "single", 1, memory_error)),
    Case("out of memory, said by CUDA itself: forward", partial(memory, "forward", 0, "single", 1, cuda_out_of_memory)),
    Case("out of memory, said by cuBLAS: backward", partial(memory, "backward", 1, "ddp", 2, cublas_out_of_memory)),
    Case("out of memory: twice in a row", partial(memory, "forward", 0, "single", 1, out_of_memory, times=2)),
    Case("out of memory: twice, being reduced", partial(memory, "armed", 1, "ddp-buckets", 2, out_of_memory, times=2)),
    Case("out of memory: both ranks", lambda: memory("forward", None, "ddp", 2, out_of_memory, times=2)),  # type: ignore[arg-type]
]


@case("out of memory: above one sample, always; the finer cut is remembered and saved")
def remembered() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fault = Fault(act=out_of_memory, phase="forward", times=None, larger_than=1)
        ended = good(train(None, [fault], folder=Path(folder)))
        same(ended, undisturbed(), ROUNDED)
        assert fault.struck == 2, f"four samples, then two must be tried once each, but {fault.struck} were"
        again = good(train(None, [fault], folder=Path(folder), updates=UPDATES + 2, resume=True))
        assert fault.struck == 2, "the cut must be read from the checkpoint"
        same(again, undisturbed(updates=UPDATES + 2), ROUNDED)


@case("out of memory: one sample, which can't be cut")
def one_sample() -> None:
    ended = train(None, [Fault(act=out_of_memory, phase="forward", update=3, times=None)])
    failed(ended, OutOfMemoryError, "can't be cut any finer")
    assert ended.update == 2


@case("out of memory: one sample, on one rank of two")
def one_sample_of_two() -> None:
    fault = Fault(act=out_of_memory, phase="forward", update=3, rank=1, times=None)
    first, second = on_ranks(2, lambda group: train(group, [fault], strategy="ddp"))
    failed(second, OutOfMemoryError, "rank 1 ran out of memory")
    failed(first, LostRankError, "rank 1 failed")
    assert first.update == second.update == 2


@case("out of memory: policy stop")
def policy_stop() -> None:
    fault = Fault(act=out_of_memory, phase="backward", update=3)
    failed(
        train(None, [fault], failures=Failures(out_of_memory=evenstep.train.Stop())),
        OutOfMemoryError,
        "ran out of memory",
    )


@case("out of memory: BatchNorm's statistics are those of the try that counted")
def statistics() -> None:
    fault = Fault(act=out_of_memory, phase="backward", update=3, times=1)
    ended = good(train(None, [fault], norm=True))
    cut = good(train(None, [Fault(act=out_of_memory, phase="transfer", update=3, times=1)], norm=True))
    same(ended, cut.parameters, EXACT)
    assert all(torch.equal(a, b) for a, b in zip(ended.buffers, cut.buffers, strict=True))


class Raising(torch.optim.SGD):
    """Raises in its step, before or after it has changed something."""

    def __init__(self, parameters: Any, *, half: bool, times: int) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.half, self.times = half, times

    def step(self, closure: Any = None) -> None:
        if self.times:
            self.times -= 1
            if self.half:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].mul_(2)
            out_of_memory()
        super().step()


@case("out of memory: optimizer step, once")
def in_step() -> None:
    wanted = good(train(optimizer=lambda parameters: Raising(parameters, half=False, times=0)))
    ended = good(train(optimizer=lambda parameters: Raising(parameters, half=False, times=1)))
    same(ended, wanted.parameters, EXACT)


@case("out of memory: optimizer step, half made")
def in_half_step() -> None:
    ended = train(optimizer=lambda parameters: Raising(parameters, half=True, times=1))
    failed(ended, OutOfMemoryError, "in the midst of the optimizer's step")
    assert ended.update == 0


@case("out of memory: optimizer step, always")
def never_a_step() -> None:
    ended = train(optimizer=lambda parameters: Raising(parameters, half=False, times=9))
    failed(ended, OutOfMemoryError, "no memory for the optimizer's step")


def evaluation() -> dict[str, Any]:
    from injector import Points

    return {
        "evaluations": {"valid": evenstep.MapData(Points(10), global_batch_size=5, micro_batch_size=5, shuffle=False)}
    }


@case("out of memory: evaluation")
def in_evaluation() -> None:
    wanted = good(train(**evaluation()))
    # without the look at the first loss, which is in evaluation mode too, and would meet the fault
    ended = good(train(None, [Fault(act=out_of_memory, phase="evaluate")], check_loss=False, **evaluation()))
    same(ended, wanted.parameters, EXACT)
    values = [end.trainer.storage.latest("valid/loss") for end in (wanted, ended)]
    assert abs(values[0].value - values[1].value) < ROUNDED  # type: ignore[union-attr]
    assert "out_of_memory" in ended.kinds


@case("micro-batch size auto: found by the first update, with the same updates")
def auto() -> None:
    fault = Fault(act=out_of_memory, phase="backward", times=None, larger_than=5)
    ended = good(train(None, [fault], micro=16))
    same(ended, undisturbed(), ROUNDED)
    assert {*ended.kinds} == {"out_of_memory"}


# Numbers that are not finite, and losses that jump.


class Poison(evenstep.Hook):
    """Makes a parameter's gradient NaN at one update, or spoils the parameters after one; `times` in all."""

    def __init__(self, update: int, *, times: int = 1, after: bool = False, rank: int = 0) -> None:
        self.at, self.times, self.after, self.rank = update, times, after, rank

    def before_update(self, event: UpdateEvent) -> None:
        self.handles = []
        if event.update == self.at and self.times and not self.after:
            self.times -= 1
            parameter = next(self.trainer.model.parameters())
            self.handles = [parameter.register_hook(lambda grad: grad * float("nan"))]

    def after_update(self, event: UpdateEvent) -> None:
        for handle in self.handles:
            handle.remove()
        if self.after and event.update == self.at and event.committed and self.times:
            self.times -= 1
            with torch.no_grad():
                for parameter in self.trainer.model.parameters():
                    parameter.mul_(100)


@case("NaN gradient: stop, at the last committed update")
def nan_stops() -> None:
    ended = train(hooks=[Poison(4)])
    failed(ended, NonFiniteError, "update 4")
    assert ended.update == 3


@case("NaN gradient: skip gives the global batch up")
def nan_skips() -> None:
    ended = good(train(hooks=[Poison(4)], failures=Failures(non_finite=evenstep.train.Skip())))
    assert ended.trainer.progress.skipped == 1
    assert ended.update == UPDATES
    assert bool(ended.parameters.isfinite().all())


@case("NaN gradient, passing: retry ends at the same bits")
def nan_retries() -> None:
    ended = good(train(hooks=[Poison(4)], failures=Failures(non_finite=evenstep.train.Retry(limit=1))))
    same(ended, undisturbed(), EXACT)


@case("NaN gradient, lasting: retry stops")
def nan_retries_in_vain() -> None:
    failed(
        train(hooks=[Poison(4, times=9)], failures=Failures(non_finite=evenstep.train.Retry(limit=2))),
        NonFiniteError,
        "update 4",
    )


def nan_on_one_rank(strategy: str) -> None:
    def act(group: Any) -> Ended:
        return train(
            group,
            hooks=[Poison(4)] if group.rank else [],
            strategy=strategy,
            failures=Failures(non_finite=evenstep.train.Skip()),
        )

    first, second = map(good, on_ranks(2, act))
    assert torch.equal(first.parameters, second.parameters), "the replicas differ"
    assert bool(first.parameters.isfinite().all())
    assert first.trainer.progress.skipped == second.trainer.progress.skipped == 1
    assert first.update == second.update == UPDATES


CASES.append(Case("NaN gradient on rank 1 of 2: all skip the same, ordered", partial(nan_on_one_rank, "ordered")))
CASES.append(Case("NaN gradient on rank 1 of 2: all skip the same, ddp", partial(nan_on_one_rank, "ddp")))
CASES.append(Case("NaN gradient on rank 1 of 2: all skip the same, zero1", partial(nan_on_one_rank, "zero1")))


SCALE, FLOOR, TRIES = 2.0**10, 2.0**8, 3


def nan_in_16_mixed(ranks: int, **more: Any) -> None:
    def act(group: Any) -> Ended:
        precision = evenstep.precision.Fp16Mixed(initial=SCALE, floor=FLOOR)
        hooks = [Poison(4, times=TRIES)] if group.rank == ranks - 1 else []
        return train(
            group, hooks=hooks, precision=precision, failures=Failures(non_finite=evenstep.train.Skip()), **more
        )

    for ended in map(good, on_ranks(ranks, act)):
        kinds = ["overflow"] * (TRIES - 1) + ["non_finite"]
        assert ended.kinds == kinds, f"one batch must be given up at the lowest scale, but there were {ended.kinds}"
        assert ended.trainer.progress.skipped == 1
        assert ended.trainer._loop.engine.parts.context.loss_scale.value == SCALE
        assert ended.update == UPDATES


CASES += [
    Case("16-mixed, a bad batch: given up at the lowest scale", partial(nan_in_16_mixed, 1)),
    Case("16-mixed, a bad batch on rank 1 of 2: all give it up, ddp", partial(nan_in_16_mixed, 2, strategy="ddp")),
    Case("16-mixed, a bad batch in stage 1 of 2: all give it up", partial(nan_in_16_mixed, 2, pipeline=2)),
]


@case("16-mixed, a bad batch: stop, and what is saved has the loss scale of before")
def nan_in_16_mixed_stops() -> None:
    with tempfile.TemporaryDirectory() as folder:
        precision = evenstep.precision.Fp16Mixed(initial=SCALE, floor=FLOOR)
        ended = train(hooks=[Poison(4, times=TRIES)], precision=precision, folder=Path(folder))
        failed(ended, NonFiniteError, "update 4")
        other = evenstep.precision.Fp16Mixed(initial=1.0)
        again = good(train(precision=other, folder=Path(folder), resume=True, new_settings=True))
        assert again.trainer.state_dict()["precision"]["scale"] == SCALE
        same(again, good(train(precision=evenstep.precision.Fp16Mixed(initial=SCALE, floor=FLOOR))).parameters, EXACT)


class PoisonBackward(evenstep.Hook):
    """Makes what a module's backward gives NaN, at one update."""

    def __init__(self, update: int) -> None:
        self.at, self.handles = update, []

    def before_update(self, event: UpdateEvent) -> None:
        if event.update == self.at:
            module = self.trainer.model.get_submodule("norm")
            poisoned = lambda module, inputs, outputs: tuple(one * float("nan") for one in inputs)  # noqa: E731
            self.handles = [module.register_full_backward_hook(poisoned)]

    def after_update(self, event: UpdateEvent) -> None:
        for handle in self.handles:
            handle.remove()


@case("NaN made in the backward on rank 1 of 2: both name the module")
def nan_in_backward() -> None:
    def act(group: Any) -> Ended:
        return train(group, hooks=[PoisonBackward(4)] if group.rank else [], strategy="ddp")

    ends = on_ranks(2, act)
    assert any(isinstance(ended.error, NonFiniteError) for ended in ends)
    for ended in ends:  # the one that is slower may hear it of the other
        failed(ended, (NonFiniteError, LostRankError), "detect_anomaly")
        assert ended.update == 3


@case("NaN in a sample: stop names the update and its micro-batch")
def nan_sample() -> None:
    def collate(samples: list[Any]) -> Any:
        point, wanted, weight = torch.utils.data.default_collate(samples)
        return torch.where(weight[:, None] == 2, point * float("nan"), point), wanted, weight

    ended = train(data={"collate": collate})
    failed(ended, NonFiniteError, "micro-batch 1: its loss is nan")
    assert ended.update == 0


@case("a sample of another dtype: stop names what raised, and nothing of the update is applied")
def other_dtype() -> None:
    def collate(samples: list[Any]) -> Any:
        point, wanted, weight = torch.utils.data.default_collate(samples)
        return point.float() if bool((weight == 2).any()) else point, wanted, weight

    ended = train(data={"collate": collate})
    failed(ended, RuntimeError, "dtype")
    assert ended.update == 0


def rewound(strategy: str, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def act(group: Any) -> Ended:
            hooks = [Poison(5), Save(every_updates=2)]
            policy = evenstep.train.Rewind()
            return train(
                group,
                strategy=strategy,
                hooks=hooks,
                folder=Path(folder),
                failures=Failures(non_finite=policy),
                writers=[JsonlWriter()],
            )

        for ended in map(good, on_ranks(ranks, act)):
            same(ended, undisturbed(strategy, ranks), EXACT)
            assert "rewind" in ended.kinds
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        assert len(lines) == len({line.split(",")[0] for line in lines}) == UPDATES, "each update's metrics once"


CASES.append(Case("NaN gradient, passing: rewind ends at the same bits", partial(rewound, "single", 1)))
CASES.append(Case("NaN gradient, passing: rewind, 2 ranks, ordered", partial(rewound, "ordered", 2)))
CASES.append(Case("NaN gradient, passing: rewind, 2 ranks, ddp", partial(rewound, "ddp", 2)))


@case("NaN gradient: rewind without a sound checkpoint before it stops")
def rewinds_to_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ended = train(
            hooks=[Poison(3, times=9)],
            folder=Path(folder),
            failures=Failures(non_finite=evenstep.train.Rewind(limit=1)),
        )
        failed(ended, NonFiniteError, "update 3")


@case("loss spike: rewind past the data that caused it")
def spike_past() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spikes = evenstep.train.LossSpikes(evenstep.train.Rewind(past_data=True), window_updates=16, threshold=20)
        more = {"folder": Path(folder), "failures": Failures(loss_spike=spikes), "updates": 20, "clip_norm": None}
        ended = good(train(hooks=[Poison(13, after=True), Save(every_updates=3)], **more))
        assert ended.kinds == ["loss_spike", "rewind"], ended.kinds
        assert ended.trainer.progress.skipped == 2, "from the checkpoint after update 12 to the batch of update 14"
        assert ended.update == 20


@case("loss spike: the newest checkpoint is spoiled as well, so the second rewind goes further back")
def spike_spoiled_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spikes = evenstep.train.LossSpikes(evenstep.train.Rewind(), window_updates=16, threshold=20)
        more = {"folder": Path(folder), "failures": Failures(loss_spike=spikes), "updates": 20}
        ended = good(train(hooks=[Poison(12, after=True), Save(every_updates=3)], **more))
        assert ended.kinds == ["loss_spike", "rewind"] * 2, ended.kinds
        same(ended, undisturbed(updates=20), EXACT)


@case("loss spike, passing: rewind ends at the same bits")
def spike_exact() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spikes = evenstep.train.LossSpikes(evenstep.train.Rewind(), window_updates=16, threshold=20)
        more = {"folder": Path(folder), "failures": Failures(loss_spike=spikes), "updates": 20}
        ended = good(train(hooks=[Poison(13, after=True), Save(every_updates=3)], **more))
        assert ended.kinds == ["loss_spike", "rewind"], ended.kinds
        same(ended, undisturbed(updates=20), EXACT)


@case("loss spike: policy stop, and a spike that is only reported")
def spike_stops() -> None:
    stop = evenstep.train.LossSpikes(evenstep.train.Stop(), window_updates=16, threshold=20)
    failed(
        train(hooks=[Poison(13, after=True)], updates=20, failures=Failures(loss_spike=stop)),
        NonFiniteError,
        "the loss of update 14",
    )
    report = evenstep.train.LossSpikes(window_updates=16, threshold=20)
    assert (
        "loss_spike"
        in good(train(hooks=[Poison(13, after=True)], updates=20, failures=Failures(loss_spike=report))).kinds
    )


@case("all weights are 0: the update is aborted")
def no_weight() -> None:
    from injector import Square

    weigh = Square.weight
    count = itertools.count()

    def weight(task: Square, batch: Any) -> float:
        return 0.0 if next(count) < 4 else weigh(task, batch)

    Square.weight = weight  # type: ignore[method-assign]
    try:
        ended = good(train(check_loss=False))  # which would ask for weights, too
    finally:
        Square.weight = weigh  # type: ignore[method-assign]
    assert ended.trainer.progress.skipped == 1
    assert ended.kinds == ["no_weight"]


# Data.


def reader(index: int, error: Exception, times: int) -> Callable[[int], None]:
    left = [times]

    def fail(sample: int) -> None:
        if sample == index and left[0]:
            left[0] -= 1
            raise error

    return fail


@case("a sample that can't be read once: read again, same bits")
def read_again() -> None:
    ended = good(train(fail=reader(7, OSError("flaky disk"), 1), data={"reading": Reading(retries=2)}))
    same(ended, undisturbed(), EXACT)
    assert ended.incidents[0].samples == (7,)


def left_out(strategy: str, ranks: int, micro: int) -> None:
    def act(group: Any) -> Ended:
        fail = reader(7, ValueError("corrupt"), 99)
        return train(
            group, fail=fail, data={"reading": Reading(retries=1, skip_failing=True)}, strategy=strategy, micro=micro
        )

    ends = [good(end) for end in on_ranks(ranks, act)]
    one = good(train(fail=reader(7, ValueError("corrupt"), 99), data={"reading": Reading(skip_failing=True)}, micro=8))
    same(ends[0], one.parameters, ROUNDED)
    counts = {end.trainer.progress.samples for end in ends}
    assert counts == {UPDATES * 16 - 2}, f"{counts}: sample 7 is in 2 epochs"
    assert any("loader" in end.kinds for end in ends)


CASES.append(Case("a sample that can't be read: left out with its weight", partial(left_out, "single", 1, 4)))
CASES.append(Case("a sample that can't be read: left out, ordered, 2 ranks", partial(left_out, "ordered", 2, 4)))
CASES.append(Case("a sample that can't be read: left out, ddp, 2 ranks", partial(left_out, "ddp", 2, 2)))


@case("a sample that can't be read: stop names it")
def read_stops() -> None:
    failed(train(fail=reader(7, ValueError("corrupt"), 99)), DataError, "sample 7 of the dataset raised")


@case("a sample that can't be read, on one rank: the other stops and says why")
def read_stops_both() -> None:
    def act(group: Any) -> Ended:
        return train(group, fail=reader(7, ValueError("corrupt"), 99), strategy="ddp")

    ends = on_ranks(2, act)
    errors = {type(end.error) for end in ends}
    assert errors == {DataError, LostRankError}, errors


@case("too many samples that can't be read: stop")
def too_many() -> None:
    def fail(sample: int) -> None:
        if sample % 2:
            raise ValueError("corrupt")

    ended = train(fail=fail, data={"reading": Reading(skip_failing=True)}, failures=Failures(max_skipped_samples=10))
    failed(ended, DataError, "could not be read")


@case("a sample of another shape: collate names the samples")
def other_shape() -> None:
    def collate(samples: list[Any]) -> Any:
        if any(float(sample[2]) == 2.0 for sample in samples):
            raise RuntimeError("stack expects each tensor to be equal size")
        return torch.utils.data.default_collate(samples)

    failed(train(data={"collate": collate}), DataError, "`collate` of the samples")


@case("a dataset that shrank since the checkpoint: resume is refused")
def shrank() -> None:
    import runs
    from injector import Points

    with tempfile.TemporaryDirectory() as folder:
        good(train(folder=Path(folder)))
        runs.Points = lambda fail=None: Points(40, fail)  # type: ignore[assignment, misc]
        try:
            failed(
                train(folder=Path(folder), resume=True, updates=9),
                CheckpointError,
                "`data.num_samples` was 48 and is now 40",
            )
        finally:
            runs.Points = Points  # type: ignore[misc]


# Hooks and writers.


class Bad(evenstep.Hook):
    """Raises in one of its methods."""

    def __init__(self, method: str, *, on_error: Any = None) -> None:
        def fail(event: Any) -> None:
            if event.update == 3 or method in ("before_train", "after_train", "before_save", "before_evaluate"):
                raise ValueError(f"a bug in {method}")

        self.failure_policy = on_error
        self._fail = fail
        self._method = method

    def before_update(self, event: UpdateEvent) -> None:
        if self._method == "before_update":
            self._fail(event)

    def after_update(self, event: UpdateEvent) -> None:
        if self._method == "after_update":
            self._fail(event)

    def after_train(self, event: Any) -> None:
        if self._method == "after_train":
            self._fail(event)

    def before_save(self, event: SaveEvent) -> None:
        if self._method == "before_save":
            self._fail(event)

    def before_evaluate(self, event: EvaluateEvent) -> None:
        if self._method == "before_evaluate":
            self._fail(event)


def hook_continues(method: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ended = good(train(hooks=[Bad(method, on_error="continue")], folder=Path(folder), **evaluation()))
    same(ended, undisturbed(), EXACT)
    assert "hook" in ended.kinds


for method in ("before_update", "after_update", "after_train", "before_save", "before_evaluate"):
    CASES.append(Case(f"a hook raises in {method}: continue", partial(hook_continues, method)))


@case("a hook raises: stop, at the committed update")
def hook_stops() -> None:
    ended = train(hooks=[Bad("before_update")])
    failed(ended, ValueError, "a bug in before_update")
    assert ended.update == 2


@case("a hook raises on one rank: the other stops and says why")
def hook_stops_both() -> None:
    def act(group: Any) -> Ended:
        return train(group, hooks=[Bad("before_update")] if group.rank == 1 else [], strategy="ordered")

    first, second = on_ranks(2, act)
    failed(second, ValueError, "a bug in before_update")
    failed(first, LostRankError, "rank 1 failed: ValueError")


class Full(evenstep.Writer):
    """A writer whose disk is full for some calls."""

    def __init__(self, fails: int) -> None:
        self.fails, self.written, self.opened = fails, [], 0

    def open(self, folder: Path | None, update: int) -> None:
        self.opened += 1
        self.written = [record for record in self.written if record.update <= update]

    def write(self, records: Any) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += records


@case("a writer's disk is full for a while: training goes on, nothing is lost")
def disk_full_for_a_while() -> None:
    writer = Full(fails=1)
    ended = good(train(writers=[writer]))
    same(ended, undisturbed(), EXACT)
    losses = [record.update for record in writer.written if record.name == "train/loss"]
    assert losses == list(range(1, UPDATES + 1)), losses
    assert ended.kinds == ["writer"], ended.kinds


@case("a writer's disk stays full: one incident, and the other writers get theirs")
def disk_full() -> None:
    dead, alive = Full(fails=10**9), Full(fails=0)
    ended = good(train(writers=[dead, alive]))
    same(ended, undisturbed(), EXACT)
    assert {record.update for record in alive.written if isinstance(record, Record)} == set(range(1, UPDATES + 1))
    assert ended.kinds[0] == "writer"
    assert ended.kinds.count("writer") <= 2, "once when it fails, and once what is lost at the end"


@case("the run folder is deleted while training: incidents, and the run goes on")
def folder_deleted() -> None:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base, "run")

        class Delete(evenstep.Hook):
            def after_update(self, event: UpdateEvent) -> None:
                if event.update == 3:
                    shutil.rmtree(folder)

        ended = good(train(hooks=[Delete()], folder=folder, writers=[JsonlWriter()]))
        same(ended, undisturbed(), EXACT)


@case("a replica changes by itself: found, and named")
def silent_corruption() -> None:
    class Flip(evenstep.Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.update == 50:
                with torch.no_grad():
                    next(self.trainer.model.parameters()).view(-1)[0] += 1e-9

    def act(group: Any) -> Ended:
        return train(group, hooks=[Flip()] if group.rank == 1 else [], strategy="ddp", updates=120)

    ends = on_ranks(2, act)
    for ended in ends:  # whoever is the first to say so
        failed(ended, EvenstepError, "rank 1 differs from rank 0, first in `first.weight`")
    assert any(isinstance(ended.error, ReplicaError) for ended in ends)


# Stopping.


class Ask(evenstep.Hook):
    def after_update(self, event: UpdateEvent) -> None:
        if event.update == 3:
            self.trainer.request_stop("enough", requeue=True)


def stops(strategy: str, ranks: int, hook: Callable[[], evenstep.Hook]) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def act(group: Any) -> Ended:
            hooks = [hook()] if group.rank == ranks - 1 else []
            return train(group, strategy=strategy, hooks=hooks, folder=Path(folder))

        for ended in map(good, on_ranks(ranks, act)):
            assert ended.update == 3
        for ended in map(
            good, on_ranks(ranks, lambda g: train(g, strategy=strategy, folder=Path(folder), resume=True))
        ):
            same(ended, undisturbed(strategy, ranks), EXACT)


CASES.append(Case("asked to stop, and resumed", partial(stops, "single", 1, Ask)))
CASES.append(Case("one rank is asked to stop: both do; resumed, ordered", partial(stops, "ordered", 2, Ask)))
CASES.append(Case("one rank is asked to stop: both do; resumed, ddp", partial(stops, "ddp", 2, Ask)))


@case("the time budget is used up: saved, and resumed to the same bits")
def time_budget() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = good(train(hooks=[TimeBudget(max_minutes=1e-9)], folder=Path(folder)))
        assert first.update == 1
        same(good(train(folder=Path(folder), resume=True)), undisturbed(), EXACT)


# Processes.


@cache
def undisturbed_processes(ranks: int, strategy: str = "ordered") -> str:
    with tempfile.TemporaryDirectory() as folder:
        said = run(ranks, folder=folder, strategy=strategy)
        return str(said[0].said["sha256"])


def process_lost(
    kind: str,
    rank: int,
    *,
    words: str,
    ranks: int = 2,
    strategy: str = "ordered",
    phase: str = "forward",
    frozen: bool = False,
    **what: Any,
) -> None:
    """The other ranks say who is missing; the run resumes, and ends at the bits of the undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        lost = (rank,) if frozen else ()
        ends = run(ranks, folder=folder, strategy=strategy, fault=kind, at=[rank, 4, phase], frozen=lost, **what)
        for other in ends[:rank] + ends[rank + 1 :]:
            assert other.code == 1, other
            assert words in other.said["error"], other.said["error"]
            assert "in update 4" in other.said["error"] or kind == "raise", other.said["error"]
            waited_s = other.seconds - ends[rank].seconds  # below 0 where the lost one ended by its watchdog, or never
            assert waited_s < 20, f"the other rank ended {waited_s:.0f} s after the lost one"
        assert list(Path(folder, "incidents").glob("*lost_rank*")), "with the last collectives"
        again = run(ranks, folder=folder, strategy=strategy, resume=True)
        assert [end.code for end in again] == [0] * ranks, again
        assert again[0].said["sha256"] == undisturbed_processes(ranks, strategy)


GONE = "rank 0, through which ranks find each other, is gone or frozen"
BUG = "failed in update 4: ValueError: a bug of the user's"
LOST: list[tuple[str, int, str, dict[str, Any]]] = [
    ("kill", 1, "rank 1 is gone", {}),
    ("kill", 0, GONE, {}),
    ("kill", 2, "rank 2 is gone;", {"ranks": 3}),
    ("segfault", 1, "rank 1 is gone", {}),
    ("exit", 1, "rank 1 is gone", {}),
    ("raise", 0, f"rank 0 {BUG}", {}),
    ("raise", 1, f"rank 1 {BUG}", {}),
    ("raise", 0, f"rank 0 {BUG}", {"ranks": 3}),
    ("sys_exit", 1, "rank 1 failed in update 4: SystemExit", {}),
    ("freeze", 1, "rank 1 did not come within 6 s", {"frozen": True, "timeout_s": 6}),
    ("freeze", 0, GONE, {"frozen": True, "timeout_s": 6}),
    ("late", 1, "rank 1 did not come within 4 s", {"timeout_s": 4}),  # 100 times as long as an update takes
    ("deadlock", 1, "rank 1", {"timeout_s": 6, "watch_s": 14}),
    ("deadlock", 1, "rank 1", {"timeout_s": 6, "watch_s": 14, "phase": "before_update"}),  # in a hook
    ("hold", 1, "rank 1", {"timeout_s": 6, "watch_s": 14}),  # Python's lock, for ever
]
for strategy in ("ddp", "zero1", "fsdp", "ordered-fsdp"):
    LOST += [("kill", 1, "rank 1 is gone", {"strategy": strategy})]
    LOST += [("raise", rank, f"rank {rank} {BUG}", {"strategy": strategy}) for rank in (0, 1)]
LOST += [("freeze", 1, "rank 1 did not come within 6 s", {"strategy": "fsdp", "frozen": True, "timeout_s": 6})]
for kind, rank, words, what in LOST:
    where = [
        f"rank {rank} of {what.get('ranks', 2)}",
        *(str(what[key]) for key in ("strategy", "phase") if key in what),
    ]
    CASES.append(Case(", ".join([kind, *where]), partial(process_lost, kind, rank, words=words, **what), slow=True))


@case("SIGSTOP, and SIGCONT in time, rank 1 of 2: the run ends as it would", slow=True)
def pause() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = run(2, folder=folder, strategy="ordered", fault="pause", at=[1, 4, "forward"])
        assert [end.code for end in ends] == [0, 0], ends
        assert ends[0].said["sha256"] == undisturbed_processes(2)


def process_stops(kind: str, rank: int, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = run(ranks, folder=folder, strategy="ordered", fault=kind, at=[rank, 3, "before_update"])
        assert [(end.code, end.said["update"]) for end in ends] == [(0, 3)] * ranks, ends
        again = run(ranks, folder=folder, strategy="ordered", resume=True)
        assert again[0].said["sha256"] == undisturbed_processes(ranks)


CASES.append(Case("SIGTERM, one process", partial(process_stops, "terminate", 0, 1), slow=True))
CASES.append(Case("SIGTERM, rank 1 of 2: both stop", partial(process_stops, "terminate", 1, 2), slow=True))
CASES.append(Case("SIGUSR1, rank 0 of 2: both stop", partial(process_stops, "user1", 0, 2), slow=True))


@case("a slow rank: the run ends as it would", slow=True)
def slow_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = run(2, folder=folder, strategy="ordered", fault="slow", at=[1, None, "forward"])
        assert [end.code for end in ends] == [0, 0]
        assert ends[0].said["sha256"] == undisturbed_processes(2)


@case("out of memory on one rank of two processes", slow=True)
def processes_out_of_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = run(2, folder=folder, strategy="ddp-buckets", fault="out_of_memory", at=[1, 4, "armed"])
        assert [end.code for end in ends] == [0, 0], ends
        assert ends[0].said["sha256"] == ends[1].said["sha256"]


CASES += [Case(name, check, slow) for name, check, slow in (*CHECKS, *REDONE, *EQUIPPED)]


def limited(check: Callable[[], None], limit_s: float) -> float:
    """Run a check; gives its seconds, which must stay below the limit: nothing may hang."""
    began = time.monotonic()
    check()
    seconds = time.monotonic() - began
    assert seconds < limit_s, f"took {seconds:.0f} s"
    return seconds


assert os.name == "posix"
