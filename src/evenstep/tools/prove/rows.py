"""The rows of the certificate: each makes the user's run another way and compares the results.

Where bits are promised, two sha256 are compared; else a difference with the bound of its number format.
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
from typing import Any, final
from warnings import catch_warnings, simplefilter

from evenstep.errors import EvenstepError, MissingExtraError, TaskError, clause
from evenstep.pipeline import Layers
from evenstep.tools.prove.run import Cut, Ended, Open, RefusedError, Variant, run_once
from evenstep.tools.prove.trace import difference, first_difference, norm

SHA = "sha256 of the state"
_CUTS: tuple[Cut, ...] = ("2", "4", "ragged")
_BOUND = {True: 1e-8, False: 1e-2}  # in float64, and in float32
_MOST_STATES = 5
Way = Callable[..., Ended]
"""Makes a run, in this process or in others: `way(updates=4, traces=False)`."""


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


@final
@dataclass(kw_only=True)
class Prover:
    """Makes the rows; what several of them need is computed once.

    Args:
        open: builds a variant of the run.
        elsewhere: makes a run in processes of its own.
        workers: workers that read the run's data, at most 2.
    """

    open: Open
    elsewhere: Way
    updates: int
    ranks: int = 2
    checks_loss: bool = True
    workers: int = 0

    def __post_init__(self) -> None:
        self._inexact = ""
        self._made: dict[Variant, Ended] = {}

    def rows(self) -> dict[str, Callable[[], Verdict]]:
        """All rows by name, in their order: the quick ones first."""
        rows: dict[str, Callable[[], Verdict]] = {"loss": self._loss, "again": lambda: self._again}
        rows |= {f"cuts {cut}": partial(self._cut, cut) for cut in _CUTS}
        if self.workers:
            rows[f"workers {self.workers}"] = lambda: self._same(self._here(Variant(workers=self.workers)))
        if self.updates > 1:
            rows |= {"resume": lambda: self._same(self._resumed), "kill": lambda: self._same(self._killed)}
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

    # ways to make the run

    def _here(self, variant: Variant) -> Way:
        return partial(run_once, self.open, variant)

    def _ended(self, variant: Variant) -> Ended:
        if variant not in self._made:
            self._made[variant] = self._here(variant)(updates=self.updates)
        return self._made[variant]

    @cached_property
    def _still(self) -> Variant:
        """Without randomness, in float64 where the model can compute in it."""
        still = Variant(still=True, wide=True)
        try:
            self._here(replace(still, cut="1"))(updates=1)
        except Exception as error:  # noqa: BLE001 - the model may raise anything in float64
            self._inexact = f"not in float64, in which the model raises {clause(error)}"
            return replace(still, wide=False)
        return still

    @property
    def _stops(self) -> list[int]:
        """Updates after which the run is stopped: the middle one and the last but one."""
        return sorted({self.updates // 2, self.updates - 1})

    def _resumed(self, *, updates: int, traces: bool = False) -> Ended:
        run = self._here(Variant())
        with tempfile.TemporaryDirectory() as name:
            for stop in self._stops:
                if stop < updates:
                    run(updates=stop, folder=Path(name))
            return run(updates=updates, traces=traces, folder=Path(name))

    def _killed(self, *, updates: int, traces: bool = False) -> Ended:
        with tempfile.TemporaryDirectory() as name:
            run = partial(self.elsewhere, Variant(), updates=updates, folder=Path(name))
            if updates > self._stops[0]:
                try:
                    run(kill_at=self._stops[0] + 1)
                except BrokenProcessPool:
                    return run(traces=traces)
                raise EvenstepError("the run was to be killed, but came to its end; nothing was saved before.")
            return run(traces=traces)

    # comparisons

    @cached_property
    def _magnified(self) -> bool:
        """True if steps magnify the rounding of gradients, as steps by their signs do."""
        whole, four = self._ended(replace(self._still, cut="1")), self._ended(self._still)
        bound = _BOUND[self._still.wide]
        by_gradient, _ = difference(whole.gradient, four.gradient, norm(whole.gradient))
        by_step, _ = difference(whole.first, four.first, whole.moved)
        return by_gradient <= bound < by_step

    def _same(self, way: Way) -> Verdict:
        run, reference = way(updates=self.updates), self._ended(Variant())
        verdict = Verdict(measure=SHA, value=run.sha256, bound=reference.sha256, holds=run.sha256 == reference.sha256)
        if verdict.holds:
            return verdict
        apart, name = difference(reference.end, run.end, reference.moved or 1.0)
        note = f"{apart:.2g} of all movement apart"
        return replace(verdict, **_explained(note, name, self._causes(self._here(Variant()), way, exact=True)))

    def _near(self, way: Way, reference: Variant) -> Verdict:
        run, other, bound = way(updates=self.updates), self._ended(reference), _BOUND[self._still.wide]
        measure = "gradient, update 1" if self._magnified else f"parameters, {self.updates} updates"
        if self._magnified and not run.gradient:
            return Verdict(measure=measure, note="gradients of shards and of stages can't be compared")
        if self._magnified:
            apart, name = difference(other.gradient, run.gradient, norm(other.gradient))
        else:
            apart, name = difference(other.end, run.end, other.moved)
        value = apart if math.isfinite(apart) else "inf"
        verdict = Verdict(measure=measure, value=value, bound=bound, holds=apart <= bound, note=self._inexact)
        if verdict.holds:
            return verdict
        causes = self._causes(self._here(reference), way, exact=False)
        return replace(verdict, **_explained("the difference", name, causes))

    def _causes(self, one: Way, other: Way, *, exact: bool) -> list[str]:
        """The first part of an update that differs between two ways, and the state that differs by then."""
        states: list[str] = []
        for update in range(1, self.updates + 1):
            here, there = (way(updates=update, traces=True) for way in (one, other))
            if exact and there.states:
                every = {**here.states, **there.states}
                paths = [f"`{path}`" for path in every if here.states.get(path) != there.states.get(path)]
                more = f" and {len(paths) - _MOST_STATES} more" if len(paths) > _MOST_STATES else ""
                listed = f"state that differs when the update begins: {', '.join(paths[:_MOST_STATES])}{more}"
                states = [listed] if paths else []
            if found := first_difference(here.parts, there.parts, exact=exact):
                return [f"update {update}: {found}", *states]
        return states

    # rows

    def _loss(self) -> Verdict:
        verdict = Verdict(measure="losses of halves add up", value="a sum", bound="a sum", holds=True)
        if not self.checks_loss:
            return Verdict(measure=verdict.measure, note="the run file says `train.check_loss = false`")
        try:
            self._here(Variant(cut="1", checks_loss=True))(updates=1)
        except TaskError as error:
            return replace(verdict, value="no sum", holds=False, causes=[str(error)])
        return verdict

    @cached_property
    def _again(self) -> Verdict:
        return self._same(self._here(Variant()))

    def _cut(self, cut: Cut) -> Verdict:
        return self._near(self._here(replace(self._still, cut=cut)), replace(self._still, cut="1"))

    def _replicated(self, strategy: str) -> Verdict:
        return self._same(partial(self.elsewhere, Variant(strategy=strategy, ranks=self.ranks)))

    def _sharded(self) -> Verdict:  # up to rounding: on the CPU shards can't be stepped by fused optimizers
        return self._near(partial(self.elsewhere, replace(self._still, strategy="fsdp", ranks=self.ranks)), self._still)

    def _stages(self) -> Verdict:
        with self.open(Variant()) as subject:
            try:
                Layers.of(subject.model)
            except EvenstepError as error:
                return Verdict(measure=SHA, note=f"its layers are not known: {error}")
            names = list(subject.model.named_parameters(remove_duplicate=False))
            is_tied = len(names) > len({id(one) for _, one in names}) or bool(getattr(subject.model, "aliases", None))
        in_stages = partial(replace, strategy="ddp", ranks=self.ranks, pipeline=self.ranks)
        if is_tied:  # gradients are summed in another order where two stages hold a copy
            return self._near(partial(self.elsewhere, in_stages(self._still)), self._still)
        return self._same(partial(self.elsewhere, in_stages(Variant())))


def _explained(note: str, name: str, causes: list[str]) -> dict[str, Any]:
    """Note and causes of a row that does not hold, with the tensor of the largest difference."""
    of = f"`{name}`" if name else "state beside the parameters"
    unexplained = f"the largest difference is in {of}; no single part of an update explains it"
    return {"note": note + (f" is largest in `{name}`" if name else ""), "causes": causes or [unexplained]}
