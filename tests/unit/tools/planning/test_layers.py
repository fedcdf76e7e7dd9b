import time
from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.pipeline import Layers
from evenstep.tools.planning.layers import balance, measure


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
