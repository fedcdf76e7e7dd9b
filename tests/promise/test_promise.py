"""One update is one update: properties of runs that hypothesis draws."""

from pathlib import Path
from tempfile import TemporaryDirectory

from drawn import legs, plain_runs, runs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from promise_runs import ALONE, Run, alone, train, trained
from reference import by_hand, distance

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
    assert trained(run, data.draw(legs(run)))["sha256"] == alone(run)["sha256"]
