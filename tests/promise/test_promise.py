"""One update is one update: properties of runs that hypothesis draws."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from drawn import legs, plain_runs, runs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from optimizers import CASES
from promise_runs import ALONE, Leg, Run, train
from reference import by_hand, distance
from rows import GROWING, on, optimizers_on, same

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@given(run=plain_runs())
@settings(max_examples=60, suppress_health_check=SLOW)
def test_any_cut_has_the_parameters_of_a_plain_loop_in_float64(run: Run) -> None:
    with TemporaryDirectory() as folder:
        ended = train(run, ALONE, str(Path(folder) / "run"))
    parameters, average = by_hand(run)
    assert distance(ended["parameters"], parameters) < 1e-12
    assert not run.ema or distance(ended["ema"], average) < 1e-12


@given(data=st.data(), run=runs())
@settings(max_examples=10, suppress_health_check=SLOW, phases=[Phase.generate])  # each takes seconds
def test_any_layout_has_the_bits_of_one_process(data: st.DataObject, run: Run) -> None:
    found, wanted = same(run, data.draw(legs(run)))
    assert found == wanted


def test_stages_that_send_larger_messages_than_before_do_not_wait_for_one_another() -> None:
    found, wanted = same(GROWING, [on("ddp", 2, 2, "breadth_first")])
    assert found == wanted


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (("NAdam in groups", "SGD fused", "Muon + AdamW", "own, not said elementwise"), on("fsdp", 2)),
        (("Muon + AdamW", "own state in lists", "own schedule-free"), on("zero1", 2)),
        (("SparseAdam", "own closure", "own references in `state_dict`"), ALONE),
    ],
    ids=["fsdp", "zero1", "one process"],
)
def test_an_optimizer_resumes_with_the_bits_of_one_process_or_is_refused(names: tuple[str, ...], layout: Leg) -> None:
    found, wanted = optimizers_on(names, layout, layout)
    assert found == wanted


def test_the_table_of_optimizers_has_every_class_of_torch() -> None:
    kinds = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    assert not {kind for kind in kinds if not any(name.startswith(kind) for name in CASES)}
