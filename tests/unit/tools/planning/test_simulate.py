import json

from evenstep.pipeline import SCHEDULES, Layout
from evenstep.tools.planning.simulate import Cost, simulate


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
