"""Plans: published formulas of bubbles and peaks, cuts by measured layers, traces, and schedules written by hand."""

import json
import time
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.errors import PlanError
from evenstep.pipeline import SCHEDULES, Layers, Layout
from evenstep.tools.planning.layers import balance, measure
from evenstep.tools.planning.simulate import Cost, Simulation, simulate
from evenstep.tools.planning.text import read_plans, write_plans, written_schedule


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(seconds: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    cuts = balance(seconds, stages)
    assert [place for places in cuts for place in places] == list(range(len(seconds)))
    assert len(cuts) == stages and all(cuts)
    every = [
        [sum(seconds[a:b]) for a, b in zip((0, *inner), (*inner, len(seconds)), strict=True)]
        for inner in combinations(range(1, len(seconds)), stages - 1)
    ]
    mine = [sum(seconds[place] for place in places) for places in cuts]
    assert max(mine) == min(map(max, every))


class Slow(nn.Module):
    """Takes 20 ms forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x * 2


def test_each_layer_is_measured_with_what_comes_before_it() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 4, bias=False), Slow(), nn.Tanh())
    costs = measure(Layers.of(model), torch.zeros(3, 2, dtype=torch.long), device=torch.device("cpu"), repeats=1)
    embedding, linear, slow, tanh = costs
    assert [cost.state_bytes for cost in costs] == [2 * 4 * 40, 2 * 4 * 32, 0, 0]
    assert embedding.input_backward_s == 0 < embedding.weight_backward_s
    assert linear.input_backward_s > 0
    assert slow.forward_s >= 0.02 > slow.input_backward_s > 0 == slow.weight_backward_s
    assert linear.activation_bytes == 4 * 6 * 8  # its input; its weight is no activation
    assert tanh.activation_bytes == 4 * 6 * 4  # its output


def test_memory_is_state_and_activations_until_the_backward_of_weights() -> None:
    layout = Layout.chain(ranks=1)
    costs = [Cost(activation_bytes=10, state_bytes=100)]
    order = SCHEDULES["zb_h1"].order(layout, range(3))[0]
    assert " ".join(map(str, order)) == "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    assert simulate([order], layout, costs).peak_bytes == (110,)
    put_off = [order[0], order[1], order[3], order[4], order[2], order[6], *order[7:], order[5]]
    assert simulate([tuple(put_off)], layout, costs).peak_bytes == (120,)


def test_the_trace_has_a_row_per_rank_and_an_event_per_computation() -> None:
    schedule = SCHEDULES["zb_h1"]
    layout = schedule.layout(3)
    costs = [Cost(forward_s=2, input_backward_s=2, weight_backward_s=2)] * layout.stages
    simulation = simulate(schedule.plans(layout, range(4)), layout, costs)
    assert simulation == simulate(schedule.order(layout, range(4)), layout, costs)
    events = json.loads(simulation.trace())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert len(boxes) == len(simulation.spans)
    assert max(event["ts"] + event["dur"] for event in boxes) == simulation.makespan_s * 1e6


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 5))
def test_what_is_written_is_read_again(name: str, ranks: int, count: int) -> None:
    schedule = SCHEDULES[name]
    layout = schedule.layout(ranks)
    text = write_plans(schedule.plans(layout, range(count)))
    assert read_plans(text) == schedule.order(layout, range(count))


@pytest.mark.parametrize("text", ["0F0\n\n0F1 0X1", "F0", "0F0,0B0", "0f0"])
def test_a_word_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        read_plans(text)


def test_a_written_schedule_runs_any_microbatches_of_its_number() -> None:
    mine = written_schedule("mine", "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    layout = mine.layout(2)
    assert layout.rank_of == (0, 1, 1, 0)
    assert str(mine.plans(layout, [5, 9])[0][0]) == "0F5"
    with pytest.raises(PlanError):
        mine.plans(layout, [0, 1, 2])
    with pytest.raises(PlanError):
        mine.layout(4)


@pytest.mark.parametrize("text", ["0F0 0B0 0R", "0F0 0B0\n0F1 0B1", "0F0 0B0\n2F0 2B0", ""])
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        written_schedule("mine", text)


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
