import pytest
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.pipeline import Layer, Layers
from evenstep.pipeline.layers import arguments, cut, flows


@pytest.mark.parametrize(
    "layers",
    [
        [Layer("a", nn.ReLU()), Layer("a", nn.ReLU())],
        [Layer("a", nn.ReLU()), Layer("a.b", nn.ReLU())],
        [Layer("a..b", nn.ReLU())],
        [Layer("a", nn.ReLU(), sources=("b",)), Layer("b", nn.ReLU())],
    ],
)
def test_ambiguous_names_and_later_sources_are_refused(layers: list[Layer]) -> None:
    with pytest.raises(ArgumentError):
        Layers(tuple(layers))


def test_a_layer_gets_its_sources_outputs_and_then_what_it_wants_of_the_inputs() -> None:
    assert arguments([1, (2, 3)], (4, 5), True) == ((1, (2, 3), 4, 5), {})  # a source's tuple is one argument
    assert arguments([1], {"a": 2, "b": 3}, True) == ((1,), {"a": 2, "b": 3})
    assert arguments([1], {"a": 2, "b": 3}, ("b",)) == ((1,), {"b": 3})
    assert arguments([1], 9, False) == ((1,), {})
    assert arguments([], [9], True) == (([9],), {})


def test_stages_begin_where_they_are_told_to_also_inside_a_module() -> None:
    nested = Layers.of(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU()))
    assert cut(nested, stages=3, split_at=["1", "1.1"]) == (range(1), range(1, 2), range(2, 4))


def test_an_output_goes_directly_to_every_stage_that_takes_it() -> None:
    layers = Layers(
        (
            Layer("encoder", nn.ReLU()),
            Layer("embedding", nn.ReLU(), sources=(), inputs=True),
            *(
                Layer(f"decoder.{n}", nn.ReLU(), sources=(f"decoder.{n - 1}" if n else "embedding", "encoder"))
                for n in range(3)
            ),
        )
    )
    encoder, others = (0,), {(1, 2): (1,), (2, 3): (2,), (3, 4): (3,)}
    wanted = {(0, stage): encoder for stage in (2, 3, 4)} | others
    assert flows(layers, cut(layers, stages=5)) == wanted
    assert flows(layers, cut(layers, stages=2)) == {(0, 1): (0, 1)}  # once, though three layers take it
