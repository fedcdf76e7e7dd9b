import json

from evenstep.pipeline import SCHEDULES
from evenstep.tools.planning.draw import draw_text, draw_trace
from evenstep.tools.planning.simulate import Cost, Costs, Simulation, simulate


def simulated(name: str, ranks: int, count: int) -> Simulation:
    layout = SCHEDULES[name].layout(ranks)
    costs = Costs.even(layout, Cost(forward_s=2, input_backward_s=2, weight_backward_s=2))
    return simulate(SCHEDULES[name].plans(layout, range(count)), layout, costs)


def lines(simulation: Simulation, width: int) -> list[str]:
    return [line.plain for line in draw_text(simulation, width=width)]


def test_computations_stand_where_they_run() -> None:
    assert lines(simulated("1f1b", 2, 3), 48) == [
        "F0--F1--........B0------F2--B1------....B2------",
        "....F0--B0------F1--B1------F2--B2------........",
    ]
    assert lines(simulated("zb_v", 2, 3), 76)[0].startswith("0F0-0F1-0F2-3F0-3I0-3W0-3F1-3I1-3W1-0I0-0W0-")


def test_what_has_no_room_for_its_name_shows_its_kind() -> None:
    assert lines(simulated("1f1b", 2, 3), 12) == ["FF..B-FB-.B-", ".FB-FB-FB-.."]


def test_the_trace_has_a_row_per_rank_and_an_event_per_computation() -> None:
    simulation = simulated("zb_h1", 3, 4)
    events = json.loads(draw_trace(simulation))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert len(boxes) == len(simulation.spans)
    assert max(event["ts"] + event["dur"] for event in boxes) == simulation.makespan_s * 1e6
