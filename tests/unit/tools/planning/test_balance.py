from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ArgumentError
from evenstep.tools.planning.balance import LayerCost, balance, stage_costs


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


def test_of_equally_fast_cuts_the_most_even_is_taken() -> None:
    assert balance([4, 1, 1, 1, 1], 3) == (range(1), range(1, 3), range(3, 5))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ArgumentError):
        balance([1, 1], 3)


def test_stages_cost_what_their_layers_cost() -> None:
    layers = [
        LayerCost(
            name=str(n),
            forward_s=n,
            input_backward_s=2 * n,
            weight_backward_s=3 * n,
            activation_bytes=10 * n,
            output_bytes=100 * n,
            state_bytes=1000 * n,
        )
        for n in range(1, 5)
    ]
    costs = stage_costs(layers, [range(1), range(1, 3), range(3, 4)], {(0, 1): (0,), (1, 2): (2,), (0, 2): (0,)})
    assert costs.forward_s == (1, 5, 4)
    assert costs.input_backward_s == (2, 10, 8)
    assert costs.weight_backward_s == (3, 15, 12)
    assert costs.activation_bytes == costs.deferred_bytes == (10, 50, 40)
    assert costs.state_bytes == (1000, 5000, 4000)
    assert costs.edge_bytes == {(0, 1): 100, (1, 2): 300, (0, 2): 100}
