"""Models in stages: what each rank builds and holds, ties, and values that later stages take."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Mesh
from evenstep.pipeline import Layer, Layers, PipelineModel
from evenstep.pipeline.layers import arguments, cut, flows
from refused import refused


def linears(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])


@pytest.mark.parametrize(
    "mine",
    [
        lambda rank: {"split_at": [str(1 + rank)]},
        lambda rank: {"schedule": ("1f1b", "gpipe")[rank]},
        lambda rank: {"model": linears(4 + rank)},
    ],
)
def test_ranks_that_cut_otherwise_are_refused_on_all_instead_of_waiting(on_ranks: Any, mine: Any) -> None:
    def act(group: Any) -> str:
        with pytest.raises(ArgumentError) as caught:
            PipelineModel(**({"model": linears(), "mesh": Mesh.of(group, pipeline=2)} | mine(group.rank)))
        return str(caught.value)

    messages = on_ranks(2, act)
    assert messages[0] == messages[1]


def test_a_rank_builds_its_own_layers_only(on_ranks: Any) -> None:
    def act(group: Any) -> list[int]:
        built: list[int] = []

        def build(place: int) -> nn.Module:
            built.append(place)
            return nn.Linear(2, 2)

        PipelineModel([lambda place=place: build(place) for place in range(4)], mesh=Mesh.of(group, pipeline=2))
        return built

    assert on_ranks(2, act) == [[0, 1], [2, 3]]


def test_what_other_ranks_hold_is_let_go(on_ranks: Any) -> None:
    def act(group: Any) -> list[bool]:
        whole = linears()
        left = [weakref.ref(layer) for layer in whole]
        staged = PipelineModel(whole, mesh=Mesh.of(group, pipeline=2))
        del whole
        gc.collect()
        assert staged.stage_modules
        return [layer() is None for layer in left]

    assert on_ranks(2, act) == [[False, False, True, True], [True, True, False, False]]


def test_shared_parameters_are_found_and_named_once_and_begin_equal(on_ranks: Any) -> None:
    def act(group: Any) -> tuple[Any, Any, torch.Tensor]:
        model = linears()
        model[3].weight = model[0].weight
        staged = PipelineModel(model, mesh=Mesh.of(group, pipeline=2))
        weight = dict(staged.named_parameters())[f"{3 * group.rank}.weight"]
        return staged.ties, list(staged.sizes), weight.detach()

    (ties, names, first), (other_ties, other_names, second) = on_ranks(2, act)
    assert ties == other_ties
    assert ties == [{"0.weight": 0, "3.weight": 1}]
    assert names == other_names
    assert len(names) == 7
    assert torch.equal(first, second)


def tied(*ties: tuple[str, str]) -> Layers:
    return Layers(Layers.of(linears()).layers, ties=ties)


def test_named_ties_make_the_copies_equal_to_the_first() -> None:
    model = PipelineModel(tied(("1.weight", "2.weight"), ("2.weight", "3.weight")))
    state = model.state_dict()
    assert torch.equal(state["1.weight"], state["2.weight"])
    assert torch.equal(state["1.weight"], state["3.weight"])
    assert model.aliases == {"2.weight": "1.weight", "3.weight": "1.weight"}
    assert model.get_submodule("3").weight is model.get_parameter("3.weight")


def test_unknown_and_unequal_ties_and_shared_modules_are_refused() -> None:
    with refused(ArgumentError, "ties"):
        PipelineModel(tied(("0.weight", "9.weight")))
    with pytest.raises(ArgumentError):
        PipelineModel(tied(("0.weight", "1.bias")))
    shared = nn.Linear(2, 2)
    with pytest.raises(ArgumentError):
        PipelineModel([shared, nn.ReLU(), shared])


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
