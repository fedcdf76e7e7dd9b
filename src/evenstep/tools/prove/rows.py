"""The rows of the certificate: each makes the user's run another way and compares the results.

Where bits are promised, two sha256 are compared; else a difference with a measured bound.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, final
from warnings import catch_warnings, simplefilter

import torch

from evenstep.errors import EvenstepError, MissingExtraError, TaskError, clause
from evenstep.tools.prove.plain import plain_loop, why_not_plain
from evenstep.tools.prove.run import Cut, Ended, Open, RefusedError, Variant, run_once
from evenstep.tools.prove.state import difference, norm
from evenstep.tools.prove.trace import UpdateTrace, find_difference

SHA = "sha256 of the state"
_CUTS: tuple[Cut, ...] = ("2", "4", "ragged")
_TIMES = 10.0  # of the measured effect of rounding
_TERMS = 100.0  # roundings of a sum that a measurement of 0 may hide
_CAP = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}
Runner = Callable[..., Ended]
"""Makes a run, in this process or in others: `runner(variant, updates=4)`."""
Causes = Callable[[], list[str]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a row; `holds` is None where the run can't have it."""

    measure: str
    value: float | str = ""
    bound: float | str = ""
    holds: bool | None = None
    note: str = ""
    causes: Sequence[str] = ()


_ONE_UPDATE = Verdict(measure=SHA, note="there is only one update")


class Measure(NamedTuple):
    """Quantity by which runs are compared, and the largest difference that rounding makes, as a share of `scale`."""

    what: str
    bound: float
    scale: float
    by_gradient: bool = False

    def __call__(self, run: Ended, reference: Ended) -> tuple[float, str]:
        if self.by_gradient:
            return difference(reference.gradient, run.gradient, self.scale)
        return difference(reference.end, run.end, self.scale)


def measure_of(reference: Ended, reordered: Ended, updates: int) -> Measure:
    """Bound of ten times the effect of summing gradients in another order, with a rounding.

    Where steps magnify rounding beyond the cap of the format, the first gradients are compared instead.
    """
    formats = {one.dtype for one in reference.end.values() if one.is_floating_point()}
    narrow = next(one for one in reversed(_CAP) if one in formats or one is torch.float64)
    eps = torch.finfo(narrow).eps
    scale = reference.moved
    if 0 < scale < math.inf:
        noise, _ = difference(reference.end, reordered.end, scale)
        bound = _TIMES * (noise + eps * (norm(reference.end) / scale + _TERMS))
        if bound <= _CAP[narrow]:
            return Measure(f"parameters, {updates} updates", bound, scale)
    scale = norm(reference.gradient)
    if not 0 < scale < math.inf:
        raise EvenstepError("nothing can be compared: no parameter moves, and the gradient is 0 or not finite.")
    noise, _ = difference(reference.gradient, reordered.gradient, scale)
    return Measure("gradient, update 1", min(_TIMES * (noise + eps * _TERMS), _CAP[narrow]), scale, by_gradient=True)


@final
@dataclass(kw_only=True)
class Prover:
    """Makes the rows; what several of them need is computed once.

    Args:
        open: builds a variant of the run.
        elsewhere: makes a run in processes of its own.
        layered: reason why the model can't be cut into stages, or "".
        uncut: reason why global batches can't be cut, or "".
        workers: workers that read the run's data, at most 2.
    """

    open: Open
    elsewhere: Runner
    updates: int
    ranks: int = 2
    precision: str = "32-true"
    layered: str = ""
    checks_loss: bool = True
    uncut: str = ""
    workers: int = 0
    seed: int = 42

    def __post_init__(self) -> None:
        self._inexact = ""

    def rows(self) -> dict[str, Callable[[], Verdict]]:
        """All rows by name, in their order: the quick ones first."""
        rows: dict[str, Callable[[], Verdict]] = {"loss": self._loss, "again": lambda: self._again}
        rows |= {f"cuts {cut}": partial(self._cut, cut) for cut in _CUTS}
        rows |= {"optimizer": self._optimizer, f"format {self.precision}": self._format}
        if self.workers:
            rows[f"workers {self.workers}"] = self._workers
        rows |= {"resume": self._resume, "kill": self._kill}
        rows |= {f"ranks {self.ranks} {name}": partial(self._replicated, name) for name in ("ddp", "zero1")}
        rows |= {f"ranks {self.ranks} fsdp": self._sharded, f"stages {self.ranks}": self._stages}
        return {name: partial(self._judged, name, row) for name, row in rows.items()}

    def _judged(self, name: str, row: Callable[[], Verdict]) -> Verdict:
        try:
            with redirect_stdout(StringIO()), catch_warnings():
                simplefilter("ignore")
                verdict = row()
                if verdict.holds is False and name not in ("loss", "again") and not self._again.holds:
                    return replace(verdict, causes=["the run differs each time it is made: see row `again`"])
                return verdict
        except RefusedError as error:
            return Verdict(measure="refused by name", note=str(error))
        except MissingExtraError:
            raise  # no row is possible before it is installed
        except Exception as error:  # noqa: BLE001 - a row that raises has failed; the others still count
            text = str(error) if isinstance(error, EvenstepError) else clause(error)
            return Verdict(measure="runs to its end", value="an error", bound="none", holds=False, causes=[text])

    # runs that several rows compare with

    def _run(self, variant: Variant, *, updates: int = 0, **more: Any) -> Ended:
        return run_once(self.open, variant, updates=updates or self.updates, **more)

    @cached_property
    def _as_it_is(self) -> Ended:
        return self._run(Variant())

    @cached_property
    def _whole(self) -> Ended:
        return self._run(replace(self._still, cut="1"))

    @cached_property
    def _four(self) -> Ended:
        return self._run(self._still)

    @cached_property
    def _still(self) -> Variant:
        """Without randomness, in float64 where the model can compute in it."""
        still = Variant(wide=True, own_format=False, still=True)
        try:
            self._run(replace(still, cut="1"), updates=1)
        except Exception as error:  # noqa: BLE001 - the model may raise anything in float64
            self._inexact = f"not in float64, in which the model raises {clause(error)}"
            return replace(still, wide=False)
        return still

    @cached_property
    def _measure(self) -> Measure:
        return measure_of(self._four, self._run(replace(self._still, fast=True, rounds=True)), self.updates)

    # comparisons

    def _same(self, run: Ended, causes: Causes) -> Verdict:
        reference = self._as_it_is
        holds = run.sha256 == reference.sha256
        verdict = Verdict(measure=SHA, value=run.sha256, bound=reference.sha256, holds=holds)
        apart, name = (0.0, "") if holds else difference(reference.end, run.end, reference.moved or 1.0)
        return _explained(verdict, f"{apart:.2g} of all movement apart", name, causes)

    def _near(self, run: Ended, reference: Ended, causes: Causes, bound: float = 0.0) -> Verdict:
        measure = self._measure
        apart, name = measure(run, reference)
        verdict = Verdict(
            measure=measure.what + (", float32" if self._inexact else ""),
            value=apart if math.isfinite(apart) else "inf",
            bound=bound or measure.bound,
            holds=apart <= (bound or measure.bound),
            note=self._inexact,
        )
        return _explained(verdict, "the difference", name, causes)

    # rows

    def _loss(self) -> Verdict:
        verdict = Verdict(measure="losses of halves add up", value="a sum", bound="a sum", holds=True)
        if not self.checks_loss:
            return Verdict(measure=verdict.measure, note="the run file says `train.check_loss = false`")
        try:
            self._run(Variant(cut="1", checks_loss=True), updates=1)
        except TaskError as error:
            return replace(verdict, value="no sum", holds=False, causes=[str(error)])
        return verdict

    @cached_property
    def _again(self) -> Verdict:
        return self._same(self._run(Variant()), lambda: self._between(Variant(), Variant()))

    def _cut(self, cut: Cut) -> Verdict:
        if self.uncut:
            return Verdict(measure="parameters", note=self.uncut)
        run = self._four if cut == "4" else self._run(replace(self._still, cut=cut))
        return self._near(run, self._whole, lambda: self._between_cuts(cut))

    def _optimizer(self) -> Verdict:
        measure = "plain PyTorch loop"
        if not self._still.wide:
            return Verdict(measure=measure, note=self._inexact)
        with self.open(self._still) as subject:
            if why := why_not_plain(subject):
                return Verdict(measure=measure, note=why)
            by_hand = plain_loop(subject, updates=self.updates, seed=self.seed)
        run = self._run(replace(self._still, own_hooks=False))  # hooks may change rates or gradients
        return replace(self._near(run, by_hand, lambda: self._between_cuts("4")), measure=measure)

    def _format(self) -> Verdict:
        still = replace(self._still, wide=False, own_format=True)
        one, four, other = map(self._run, (replace(still, cut="1"), still, replace(still, fast=True)))
        exact = self._four if self._still.wide else other
        rounding = max(self._measure(run, exact)[0] for run in (four, other))
        bound = max(_TIMES * rounding, self._measure.bound)
        found = self._near(one, exact, lambda: self._between_cuts("4"), bound)
        return replace(found, measure="distance to float64") if self._still.wide else found

    def _workers(self) -> Verdict:
        reading = Variant(workers=self.workers)
        return self._same(self._run(reading), lambda: self._between(Variant(), reading))

    @property
    def _stops(self) -> list[int]:
        """Updates after which the run is stopped: the middle one and the last but one."""
        return sorted({max(1, self.updates // 2), self.updates - 1})

    def _resume(self) -> Verdict:
        if self.updates < 2:
            return _ONE_UPDATE
        with tempfile.TemporaryDirectory() as name:
            for stop in self._stops:
                self._run(Variant(), updates=stop, folder=Path(name))
            run = self._run(Variant(), folder=Path(name))
        return self._same(run, self._after_resume)

    def _kill(self) -> Verdict:
        if self.updates < 2:
            return _ONE_UPDATE
        with tempfile.TemporaryDirectory() as name:
            elsewhere = partial(self.elsewhere, Variant(), updates=self.updates, folder=Path(name))
            try:
                elsewhere(kill_at=self._stops[0] + 1)
            except BrokenProcessPool:
                run = elsewhere()
            else:
                raise EvenstepError("the run was to be killed, but came to its end; nothing was saved before.")
        return self._same(run, lambda: self._after_resume() or self._between(Variant(), Variant(), self.elsewhere))

    def _replicated(self, strategy: str) -> Verdict:
        variant = Variant(strategy=strategy, ranks=self.ranks)
        return self._same(self.elsewhere(variant, updates=self.updates), lambda: self._of_ranks(variant))

    def _sharded(self) -> Verdict:  # up to rounding: on the CPU shards can't be stepped by fused optimizers
        variant = replace(self._still, strategy="fsdp", ranks=self.ranks)
        run = self.elsewhere(variant, updates=self.updates)
        if self._measure.by_gradient and not run.gradient:
            return Verdict(measure=self._measure.what, note="shards of gradients can't be compared")
        return self._near(run, self._four, lambda: self._of_ranks(variant))

    def _stages(self) -> Verdict:
        if self.layered:
            return Verdict(measure=SHA, note=self.layered)
        with self.open(Variant()) as subject:
            names = list(subject.model.named_parameters(remove_duplicate=False))
            is_tied = len(names) > len({id(one) for _, one in names}) or bool(getattr(subject.model, "aliases", None))
        if is_tied and self._measure.by_gradient:
            return Verdict(measure=self._measure.what, note="gradients of stages can't be compared")
        variant = self._still if is_tied else Variant()
        variant = replace(variant, strategy="ddp", ranks=self.ranks, pipeline=self.ranks)
        run = self.elsewhere(variant, updates=self.updates)
        if is_tied:  # gradients are summed in another order where two stages hold a copy
            return self._near(run, self._four, lambda: self._of_ranks(variant))
        return self._same(run, lambda: self._of_ranks(variant))

    # causes of failures: the first part of an update that differs

    def _trace(self, run: Runner, variant: Variant, update: int, **more: Any) -> UpdateTrace:
        trace = run(variant, updates=update, traces=True, **more).trace
        assert trace is not None
        return trace

    def _between(self, one: Variant, other: Variant, run_other: Runner | None = None) -> list[str]:
        here, there = partial(self._trace, self._run, one), partial(self._trace, run_other or self._run, other)
        exact = (one.cut, one.ranks) == (other.cut, other.ranks)
        return find_difference(here, there, range(1, self.updates + 1), exact=exact)

    def _between_cuts(self, cut: Cut) -> list[str]:
        one = replace(self._still, cut="1")
        return self._between(one, replace(one, cut=cut))

    def _after_resume(self) -> list[str]:
        def resumed(update: int) -> UpdateTrace:
            with tempfile.TemporaryDirectory() as name:
                self._run(Variant(), updates=stop, folder=Path(name))
                return self._trace(self._run, Variant(), update, folder=Path(name))

        whole = partial(self._trace, self._run, Variant())
        for stop in self._stops:
            if found := find_difference(whole, resumed, range(stop + 1, self.updates + 1), exact=True):
                return found
        return []

    def _of_ranks(self, variant: Variant) -> list[str]:
        found = [] if self.uncut else self._between_cuts("4")
        if not found and variant.pipeline == 1:
            found = self._between(replace(variant, ranks=1, strategy="single"), variant, self.elsewhere)
        return found


def _explained(verdict: Verdict, note: str, name: str, causes: Causes) -> Verdict:
    """A verdict with the tensor of the largest difference and the causes, if it does not hold."""
    if verdict.holds:
        return verdict
    of = f"`{name}`" if name else "state beside the parameters"
    unexplained = f"the largest difference is in {of}; no single part of an update explains it"
    largest = f" is largest in `{name}`" if name else ""
    return replace(verdict, note=note + largest, causes=causes() or [unexplained])
