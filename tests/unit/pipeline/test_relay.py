"""Outputs that are relayed from stage to stage: what arrives, and which bits come back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import MapData, Task, Trainer
from evenstep.parallel import Mesh, Ordered
from evenstep.pipeline import Layer, Layers, PipelineModel
from evenstep.pipeline.split import cut, flows

OnRanks = Callable[..., list[Any]]


class Mixed(nn.Module):
    """Σ tanh(W x_i) · i over its sources, the first of which it reads twice; a mask goes along."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, *sources: Any) -> dict[str, Any]:
        tensors = [one["x"] if isinstance(one, dict) else one for one in sources]
        total = self.linear(tensors[0]).tanh() + 0.3 * tensors[0]
        for place, x in enumerate(tensors[1:], start=2):
            total = total + self.linear(x).sigmoid() / place
        return {"x": total, "mask": total.detach() > 0, "n": len(sources)}


class Total(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output["x"].sum(-1) - batch[1]) ** 2).masked_fill(~output["mask"].any(-1), 0.5).sum()


def graph(sources: list[list[int]]) -> Layers:
    """A model of `Mixed` layers; layer 0 takes the input."""
    names = [f"layer{place}" for place in range(len(sources) + 1)]
    rest = [
        Layer(names[place], Mixed(place), sources=tuple(names[source] for source in theirs))
        for place, theirs in enumerate(sources, start=1)
    ]
    return Layers((Layer(names[0], Mixed(0)), *rest))


def decoders(count: int) -> Layers:
    """An output that all of `count` later layers take."""
    return graph([[place, 0] if place else [0] for place in range(count)])


def trained(model: PipelineModel, strategy: Ordered) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    pairs = [(torch.randn(3, generator=generator), torch.tensor(float(n % 3))) for n in range(11)]
    trainer = Trainer(
        model=model,
        task=Total(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data=MapData(pairs, global_batch_size=5, micro_batch_size=2),
        updates=3,
        device="cpu",
        strategy=strategy,
    )
    trainer.train()
    return trainer.state_dict()["model"]


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """For each layer but the first its sources; every output is taken by a later layer."""
    count = draw(st.integers(2, 7))
    sources = [
        [place - 1, *draw(st.lists(st.integers(0, place - 1), unique=True, max_size=2))] for place in range(1, count)
    ]
    return [list(dict.fromkeys(theirs)) for theirs in sources]


@settings(max_examples=15)
@given(graphs(), st.data())
def test_relayed_outputs_train_to_the_bits_of_the_whole_model_however_it_is_cut(
    sources: list[list[int]], data: st.DataObject
) -> None:
    whole = trained(PipelineModel(graph(sources)), Ordered())
    stages = data.draw(st.integers(2, len(sources) + 1))
    names = [f"layer{place}" for place in range(1, len(sources) + 1)]
    begins = sorted(data.draw(st.permutations(names))[: stages - 1])
    model = PipelineModel(graph(sources), split_at=begins, relay_skips=True)
    assert all(destination == source + 1 for source, destination in model.layout.edges)
    check_same(trained(model, Ordered()), whole)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (3, "zb_h1"), (2, "interleaved"), (2, "zb_v")])
def test_ranks_relay_to_the_bits_of_one_process(on_ranks: OnRanks, ranks: int, schedule: str) -> None:
    def act(group: Any) -> dict[str, Any]:
        mesh = Mesh.of(group, pipeline=ranks)
        return trained(PipelineModel(decoders(6), mesh=mesh, schedule=schedule, relay_skips=True), Ordered(mesh.data))

    check_same(on_ranks(ranks, act)[0], trained(PipelineModel(decoders(6)), Ordered()))


@given(graphs(), st.integers(1, 4))
def test_what_is_relayed_passes_neighbours_only_and_reaches_all_who_take_it(
    sources: list[list[int]], stages: int
) -> None:
    layers = graph(sources)
    places = cut(layers, stages=min(stages, len(layers.layers)))
    stage_of = {place: stage for stage, theirs in enumerate(places) for place in theirs}
    relayed = flows(layers, places, relayed=True)
    here = {stage: set(theirs) for stage, theirs in enumerate(places)}
    for (source, destination), carried in relayed.items():  # in the order in which stages run
        assert destination == source + 1
        assert set(carried) <= here[source]
        here[destination] |= set(carried)
    for place in stage_of:
        assert set(layers.sources(place)) <= here[stage_of[place]]
    direct = flows(layers, places)
    assert {place for carried in direct.values() for place in carried} == {
        place for carried in relayed.values() for place in carried
    }


def test_direct_and_relayed_give_the_same_bits_where_only_the_last_stage_reads_an_output_twice() -> None:
    # else a stage sums the gradients of its own readers before those of later stages are there
    cuts = {"relayed": ["layer2", "layer3"], "direct": ["layer2", "layer3"], "last": ["layer2"]}
    found = {
        name: trained(PipelineModel(decoders(4), split_at=begins, relay_skips=name == "relayed"), Ordered())
        for name, begins in cuts.items()
    }
    check_same(found["relayed"], found["direct"])
    check_same(found["relayed"], found["last"])
