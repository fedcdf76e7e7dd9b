"""Plans: cuts by measured layers, simulated memory and traces, and schedules written by hand."""

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
from evenstep.tools.planning.simulate import Cost, simulate
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
