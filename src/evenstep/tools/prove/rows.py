"""The rows of the certificate: each runs the user's run another way and compares it with the run as it was.

Where bits are promised, two sha256 are compared; else a difference with a measured bound (see `compare`).
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any, cast, final
from warnings import catch_warnings, simplefilter

from evenstep.errors import EvenstepError, MissingExtraError, TaskError, clause
from evenstep.tools.prove.compare import TIMES, Difference, Measure, difference, measure_of, moved
from evenstep.tools.prove.first_difference import (
    difference_of_resume,
    difference_of_runs,
    difference_of_variants,
)
from evenstep.tools.prove.plain import plain_loop, why_not_plain
from evenstep.tools.prove.runs import RefusedError, Rounding, run_once
from evenstep.tools.prove.subject import Bench, Cut, Ended, InProcesses, Subject, Variant

CUTS: tuple[Cut, ...] = ("2", "4", "ragged")
SHA = "sha256 of the state"
_UNKNOWN = "the largest difference is in {name}; no single part of an update explains it"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a row has found.

    Args:
        holds: None where the run can't have this row.
    """

    measure: str
    value: float | str = ""
    bound: float | str = ""
    holds: bool | None = None
    note: str = ""
    causes: Sequence[str] = ()


@final
class Prover:
    """Runs what rows need, each thing once."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._inexact = ""
        self._causes: dict[str, list[str]] = {}
        self._raised: dict[str, str] = {}

    def rows(self) -> dict[str, Callable[[], Verdict]]:
        """All rows by name, in their order: the quick ones first."""
        bench, ranks = self._bench, self._bench.ranks
        apart = [(f"ranks {ranks} {name}", partial(self._apart, name)) for name in ("ddp", "fsdp", "zero1")]
        listed: list[tuple[str, Callable[[], Verdict]]] = [
            ("loss", self._loss),
            ("again", lambda: self._again),
            *((f"cuts {cut}", partial(self._cut, cut)) for cut in CUTS),
            ("optimizer", self._optimizer),
            (f"format {bench.precision}", self._format),
            *([(f"workers {bench.workers}", self._workers)] if bench.workers else []),
            ("resume", self._resume),
            ("kill", self._kill),
            (f"ranks {ranks} ordered", self._ordered),
            *apart,
            (f"stages {ranks}", self._stages),
        ]
        return {name: partial(self._judged, name, run) for name, run in listed}

    def _judged(self, name: str, run: Callable[[], Verdict]) -> Verdict:
        try:
            with redirect_stdout(StringIO()), catch_warnings():
                simplefilter("ignore")
                return run()
        except RefusedError as error:
            return Verdict(measure="refused by name", note=str(error))
        except MissingExtraError:
            raise  # no row can be had before it is installed
        except Exception as error:  # noqa: BLE001 - a row that raises has failed; the others still count
            said = str(error) if isinstance(error, EvenstepError) else clause(error)
            first = self._raised.setdefault(said, name)
            said = said if first == name else f"it raises what row `{first}` does"
            return Verdict(measure="runs to its end", value="an error", bound="none", holds=False, causes=[said])

    def _run(self, variant: Variant, **more: Any) -> Ended:
        return run_once(self._bench.open, variant, updates=self._bench.updates, **more)

    @cached_property
    def _plain(self) -> Ended:
        return self._run(Variant())

    @cached_property
    def is_wide(self) -> bool:
        try:
            run_once(self._bench.open, Variant(cut="1", wide=True, own_format=False, still=True), updates=1)
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model raises in float64, it can't have it
            self._inexact = f"not in float64, in which the model raises {clause(error)}"
            return False
        return True

    @property
    def _still(self) -> Variant:
        return Variant(wide=self.is_wide, own_format=False, still=True)

    @cached_property
    def _whole(self) -> Ended:
        return self._run(replace(self._still, cut="1"))

    @cached_property
    def _four(self) -> Ended:
        return self._run(self._still)

    @cached_property
    def _measure(self) -> Measure:
        reordered = self._run(replace(self._still, ordered=True), hooks=_rounding)
        return measure_of(self._four, reordered, updates=self._bench.updates)

    def _near(self, run: Ended, reference: Ended, causes: Callable[[], list[str]]) -> Verdict:
        measure = self._measure
        apart = measure(run, reference)
        holds = apart.value <= measure.bound
        return Verdict(
            measure=measure.what + ("" if self.is_wide else ", float32"),
            value=apart.value,
            bound=measure.bound,
            holds=holds,
            note=_largest(apart) if holds is False else self._inexact,
            causes=() if holds else causes() or [_unexplained(apart)],
        )

    def _loss(self) -> Verdict:
        measure = "losses of halves add up"
        if not self._bench.checks_loss:
            return Verdict(measure=measure, note="the run file says `train.check_loss = false`")
        try:
            run_once(self._bench.open, Variant(cut="1", checks_loss=True), updates=1)
        except TaskError as error:
            return Verdict(measure=measure, value="no sum", bound="a sum", holds=False, causes=[str(error)])
        return Verdict(measure=measure, value="a sum", bound="a sum", holds=True)

    @cached_property
    def _again(self) -> Verdict:
        again = self._run(Variant())
        return self._same(again, self._plain, lambda: self._blame("again"))

    def _same(self, run: Ended, reference: Ended, causes: Callable[[], list[str]]) -> Verdict:
        holds = run.sha256 == reference.sha256
        apart = Difference(value=0.0, of="") if holds else difference(reference.end, run.end, moved(reference) or 1.0)
        note = "" if holds else f"{apart.value:.2g} of all movement apart{_in(apart)}"
        return Verdict(
            measure=SHA,
            value=run.sha256,
            bound=reference.sha256,
            holds=holds,
            note=note,
            causes=() if holds else causes() or [_unexplained(apart)],
        )

    def _blame(self, what: str) -> list[str]:
        if what not in self._causes:
            self._causes[what] = []  # also if the search raises
            self._causes[what] = self._search(what)
        return self._causes[what]

    def _search(self, what: str) -> list[str]:
        bench = self._bench
        if what == "again":
            return difference_of_variants(bench.open, Variant(), Variant(), updates=bench.updates)
        if what == "workers":
            return difference_of_variants(bench.open, Variant(), self._reading, updates=bench.updates)
        if what == "resume":
            for stop in self._stops:
                if found := difference_of_resume(bench.open, Variant(), stop_after=stop, updates=bench.updates):
                    return found
            return []
        one = replace(self._still, cut="1")
        other = replace(one, cut=cast("Cut", what))
        return difference_of_variants(bench.open, one, other, updates=bench.updates)

    @property
    def _reading(self) -> Variant:
        return Variant(workers=self._bench.workers)

    def _workers(self) -> Verdict:
        run = self._run(self._reading)
        return self._same(run, self._plain, lambda: [*self._if_not_again(), *self._blame("workers")])

    def _cut(self, cut: Cut) -> Verdict:
        if self._bench.uncut:
            return Verdict(measure="parameters", note=self._bench.uncut)
        run = self._four if cut == "4" else self._run(replace(self._still, cut=cut))
        return self._near(run, self._whole, lambda: [*self._if_not_again(), *self._blame(cut)])

    def _if_not_again(self) -> list[str]:
        why = "the run is another each time that it is made, whatever is done to it: see row `again`"
        return [] if self._again.holds else [why]

    def _optimizer(self) -> Verdict:
        measure = "plain PyTorch loop"
        if not self.is_wide:
            return Verdict(measure=measure, note=self._inexact)
        with self._bench.open(self._still) as subject:
            if why := why_not_plain(subject):
                return Verdict(measure=measure, note=why)
            by_hand, hooked = plain_loop(subject, updates=self._bench.updates, seed=self._bench.seed), subject.hooks
        run = self._run(self._still, own_hooks=False) if hooked else self._four  # which may change rates, or gradients
        found = self._near(run, by_hand, lambda: self._blame("4"))
        return replace(found, measure=measure)

    def _format(self) -> Verdict:
        still = replace(self._still, wide=False, own_format=True)
        one, four, other = (
            self._run(variant) for variant in (replace(still, cut="1"), still, replace(still, ordered=True))
        )
        exact, measure = self._four if self.is_wide else other, self._measure
        rounding = max(measure(four, exact).value, measure(other, exact).value)
        apart, bound = measure(one, exact), TIMES * max(rounding, measure.bound / TIMES)
        holds = apart.value <= bound
        return Verdict(
            measure="distance to float64" if self.is_wide else measure.what,
            value=apart.value,
            bound=bound,
            holds=holds,
            note="" if holds else _largest(apart),
            causes=() if holds else self._blame("4") or [_unexplained(apart)],
        )

    @property
    def _middle(self) -> int:
        return max(1, self._bench.updates // 2)

    @property
    def _stops(self) -> list[int]:
        return sorted({self._middle, self._bench.updates - 1})

    def _resume(self) -> Verdict:
        if self._bench.updates < 2:
            return Verdict(measure=SHA, note="there is only one update")
        with tempfile.TemporaryDirectory() as name:
            for stop in self._stops:
                run_once(self._bench.open, Variant(), updates=stop, folder=Path(name))
            run = self._run(Variant(), folder=Path(name))
        return self._same(run, self._plain, lambda: self._of_resume(None))

    def _of_resume(self, elsewhere: InProcesses | None) -> list[str]:
        if found := self._if_not_again():
            return found
        found = self._blame("resume")
        if not found and elsewhere is not None:
            trace = partial(elsewhere.traced, Variant())
            updates = self._bench.updates
            found = difference_of_runs(self._bench.open, Variant(), trace, updates=updates, exact=True)
        return found

    def _kill(self) -> Verdict:
        elsewhere, updates = self._bench.elsewhere, self._bench.updates
        if updates < 2:
            return Verdict(measure=SHA, note="there is only one update")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if elsewhere(Variant(), updates=updates, folder=folder, kill_at=self._middle + 1) is not None:
                raise EvenstepError("the run was to be killed, but came to its end; nothing was saved before.")
            run = elsewhere(Variant(), updates=updates, folder=folder)
        assert run is not None
        return self._same(run, self._plain, lambda: self._of_resume(elsewhere))

    def _elsewhere(self, variant: Variant) -> Ended:
        try:
            run = self._bench.elsewhere(variant, updates=self._bench.updates)
        except RefusedError as error:
            if variant.strategy == self._bench.own_strategy:
                raise EvenstepError(str(error)) from error
            raise
        assert run is not None, "it was not to be killed"
        return run

    def _ordered(self) -> Verdict:
        variant = Variant(ordered=True, strategy="ddp", ranks=self._bench.ranks)
        run = self._elsewhere(variant)
        return self._same(run, self._run(Variant(ordered=True)), lambda: self._of_ranks(variant))

    def _of_ranks(self, variant: Variant) -> list[str]:
        found = [] if self._bench.uncut else self._blame("4")
        if not found and variant.pipeline == 1:
            one = replace(variant, ranks=1, strategy="single")
            trace = partial(self._bench.elsewhere.traced, variant)
            found = difference_of_runs(self._bench.open, one, trace, updates=self._bench.updates, exact=False)
        return found

    def _apart(self, strategy: str) -> Verdict:
        variant = replace(self._still, strategy=strategy, ranks=self._bench.ranks)
        run = self._elsewhere(variant)
        if self._measure.by_gradient and not run.gradient:
            return Verdict(measure="gradient, update 1", note="shards of gradients can't be compared")
        return self._near(run, self._four, lambda: self._of_ranks(variant))

    def _stages(self) -> Verdict:
        if self._bench.layered:
            return Verdict(measure=SHA, note=self._bench.layered)
        ranks, tied = self._bench.ranks, self._tied
        if tied and self._measure.by_gradient:
            return Verdict(measure=self._measure.what, note="gradients of stages can't be compared")
        variant = replace(self._still if tied else Variant(ordered=True), strategy="ddp", ranks=ranks, pipeline=ranks)
        run = self._elsewhere(variant)
        if tied:  # whose gradients are summed in another order where two stages have a copy
            return self._near(run, self._four, lambda: self._of_ranks(variant))
        return self._same(run, self._run(Variant(ordered=True)), lambda: self._of_ranks(variant))

    @property
    def _tied(self) -> bool:
        with self._bench.open(Variant()) as subject:
            model = subject.model
            every = list(model.named_parameters(remove_duplicate=False))
            return len(every) > len({id(one) for _, one in every}) or bool(getattr(model, "aliases", None))


def _rounding(subject: Subject) -> list[Rounding]:
    return [Rounding()]


def _unexplained(apart: Difference) -> str:
    return _UNKNOWN.format(name=f"`{apart.of}`" if apart.of else "state beside the parameters")


def _largest(apart: Difference) -> str:
    return f"largest in `{apart.of}`" if apart.of else ""


def _in(apart: Difference) -> str:
    return f", most of it in `{apart.of}`" if apart.of else ""
