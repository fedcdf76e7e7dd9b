"""Bubbles, peaks and warm-ups against the published formulas, exactly, over ranks, stages and micro-batches.

Costs are whole numbers that 1 to 4 stages per rank divide; peaks are counted in activations of one stage.
"""

import pytest

from evenstep.pipeline import SCHEDULES, Layout
from evenstep.tools.planning.simulate import Cost, Simulation, simulate

P = (2, 3, 8)
TIMES = [(120, 120, 120), (120, 144, 84)]  # f, i, w of one rank's share


def run(name: str, ranks: int, count: int, times: tuple[int, int, int], stages: int | None = None) -> Simulation:
    layout = SCHEDULES[name].layout(ranks, stages)
    each = layout.stages // ranks
    forward, inputs, weights = (time // each for time in times)
    cost = Cost(forward_s=forward, input_backward_s=inputs, weight_backward_s=weights, activation_bytes=1)
    done = simulate(SCHEDULES[name].order(layout, range(count)), layout, [cost] * layout.stages)
    assert done.busy_s == (count * sum(times),) * ranks
    return done


def bubble(done: Simulation) -> float:
    return done.bubble_s[0]


def stage_bubble(done: Simulation) -> float:
    """The longest idle time of a rank between its first start and its last end."""
    own = [[span for span in done.spans if span.rank == rank] for rank in range(len(done.busy_s))]
    windows = [max(span.end for span in spans) - min(span.start for span in spans) for spans in own]
    return max(window - busy for window, busy in zip(windows, done.busy_s, strict=True))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", P)
def test_gpipe_and_1f1b_have_the_same_bubble_and_other_peaks(ranks: int, times: tuple[int, int, int]) -> None:
    for count in (1, 2, 3, ranks - 1, ranks, ranks + 1, 13, 32):
        gpipe, alternating = run("gpipe", ranks, count, times), run("1f1b", ranks, count, times)
        assert bubble(gpipe) == bubble(alternating) == (ranks - 1) * sum(times)
        assert gpipe.bubble_share == pytest.approx((ranks - 1) / (count + ranks - 1), rel=1e-12)
        assert gpipe.peak_bytes == (count,) * ranks
        assert alternating.peak_bytes == tuple(min(count, ranks - rank) for rank in range(ranks))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("stages", range(1, 5))
@pytest.mark.parametrize("ranks", P)
def test_interleaved_and_breadth_first_divide_the_bubble(ranks: int, stages: int, times: tuple[int, int, int]) -> None:
    layout = Layout.chain(ranks=ranks, stages_per_rank=stages)
    forward, inputs, weights = (time // stages for time in times)
    cost = Cost(forward_s=forward, input_backward_s=inputs, weight_backward_s=weights, activation_bytes=1)
    costs = [cost] * layout.stages
    for count in sorted({ranks, 2 * ranks, 32 // ranks * ranks}):
        done = simulate(SCHEDULES["interleaved"].order(layout, range(count)), layout, costs)
        assert bubble(done) * stages == (ranks - 1) * sum(times)
        if count > ranks:
            assert done.peak_bytes == tuple((stages - 1) * ranks + 2 * (ranks - r - 1) + 1 for r in range(ranks))
        done = simulate(SCHEDULES["breadth_first"].order(layout, range(count)), layout, costs)
        assert bubble(done) * stages == (ranks - 1) * sum(times)
        assert done.peak_bytes == (count * stages,) * ranks


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", P)
def test_zb_h1_leaves_what_weights_cannot_fill(ranks: int, times: tuple[int, int, int]) -> None:
    forward, inputs, weights = times
    for count in (ranks, ranks + 1, 2 * ranks, 32):
        done = run("zb_h1", ranks, count, times)
        assert stage_bubble(done) == (ranks - 1) * (forward + inputs - weights)
        assert max(done.peak_bytes) == ranks


@pytest.mark.parametrize("ranks", P)
def test_zb_v_has_no_bubble_between_first_and_last_action(ranks: int) -> None:
    for count in (2 * ranks, 2 * ranks + 1, 32):
        done = run("zb_v", ranks, count, (120, 120, 120))
        assert stage_bubble(done) == 0
        assert bubble(done) * 2 == (ranks - 1) * 120
        assert max(done.peak_bytes) == 2 * ranks
