from evenstep.pipeline import SCHEDULES, Layout
from evenstep.tools.planning.simulate import Cost, Costs, simulate


def test_messages_delay_and_are_counted() -> None:
    layout = Layout(rank_of=(0, 1, 1), edges=((0, 1), (1, 2), (0, 2)))
    costs = Costs(
        stages=tuple(Cost(forward_s=forward, input_backward_s=1, weight_backward_s=1) for forward in (1, 2, 3)),
        edge_bytes={(0, 1): 10, (1, 2): 1000, (0, 2): 20},
        latency_s=5,
        seconds_per_byte=1,
    )
    done = simulate(SCHEDULES["sequential"].plans(layout, [0]), layout, costs)
    # 0F0 ends at 1, reaches stage 1 at 16; stage 2 waits for 1F0 at 18, though stage 0's came at 26: it starts at 26
    assert [(str(span.action), span.start, span.end) for span in done.spans] == [
        ("0F0", 0, 1),
        ("1F0", 16, 18),
        ("2F0", 26, 29),
        ("2B0", 29, 31),
        ("1B0", 31, 33),
        ("0B0", 56, 58),
    ]
    assert done.link_bytes == {(0, 1): 30, (1, 0): 30}
    assert done.busy_s == (3, 9)
    assert done.bubble_s == (55, 49)
    assert done.bubble_share == (55 + 49) / (2 * 58)


def test_memory_is_state_and_activations_until_the_backward_of_weights() -> None:
    layout = Layout.chain(ranks=1)
    costs = Costs(stages=(Cost(activation_bytes=10, state_bytes=100),))
    order = SCHEDULES["zb_h1"].order(layout, range(3))[0]
    assert " ".join(map(str, order)) == "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    assert simulate([order], layout, costs).peak_bytes == (110,)
    put_off = [order[0], order[1], order[3], order[4], order[2], order[6], *order[7:], order[5]]
    assert simulate([tuple(put_off)], layout, costs).peak_bytes == (120,)


def test_complete_plans_cost_the_same_as_their_computations() -> None:
    schedule = SCHEDULES["interleaved"]
    layout = schedule.layout(3)
    share = Cost(forward_s=2, input_backward_s=4, weight_backward_s=2, activation_bytes=6, output_bytes=8)
    costs = Costs.even(layout, share, latency_s=1)
    plans = schedule.plans(layout, range(7))
    assert simulate(plans, layout, costs) == simulate(schedule.order(layout, range(7)), layout, costs)
