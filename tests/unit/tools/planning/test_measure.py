import time

import torch
from torch import Tensor, nn

from evenstep.pipeline import Layer, Layers
from evenstep.tools.planning.measure import measure


class Slow(nn.Module):
    """Takes 20 ms forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x * 2


def test_each_layer_is_measured_with_what_comes_before_it() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 4, bias=False), Slow(), nn.Tanh())
    costs = measure(Layers.of(model), torch.zeros(3, 2, dtype=torch.long), repeats=1)
    embedding, linear, slow, tanh = costs
    assert [cost.output_bytes for cost in costs] == [4 * 6 * 8, 4 * 6 * 4, 4 * 6 * 4, 4 * 6 * 4]
    assert [cost.state_bytes for cost in costs] == [2 * 4 * 40, 2 * 4 * 32, 0, 0]
    assert embedding.input_backward_s == 0 < embedding.weight_backward_s
    assert linear.input_backward_s > 0
    assert slow.forward_s >= 0.02 > slow.input_backward_s > 0 == slow.weight_backward_s
    assert linear.activation_bytes == 4 * 6 * 8  # its input; its weight is no activation
    assert tanh.activation_bytes == 4 * 6 * 4  # its output


def test_the_parameters_and_their_gradients_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = model[0].weight.clone()
    measure(Layers.of(model), torch.ones(1, 2), repeats=1)
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, before)


def test_layers_with_several_sources_and_keyword_inputs_are_measured() -> None:
    class Join(nn.Module):
        def forward(self, first: Tensor, second: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            return first * scale, second

    layers = Layers(
        (
            Layer("a", nn.Linear(2, 2), inputs=()),
            Layer("b", nn.Tanh()),
            Layer("join", Join, sources=("a", "b"), inputs=("scale",)),
        )
    )
    layers = Layers((Layer("a", nn.Identity(), inputs=("input",)), *layers.layers[1:]))
    costs = measure(layers, {"input": torch.ones(3, 2), "scale": torch.ones(3, 2)}, repeats=1)
    assert costs[2].output_bytes == 2 * 4 * 6
