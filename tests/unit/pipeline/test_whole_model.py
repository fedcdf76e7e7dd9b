"""The whole of a model in stages on one rank: its modules without tensors, and the tensors that come into them."""

import gc
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.parallel import Mesh
from evenstep.pipeline import Layer, PipelineModel
from evenstep.pipeline.outline import LayersInTurn
from evenstep.pipeline.whole_model import WholeModel
from evenstep.pipeline.wire import Wire

OnRanks = Callable[..., list[Any]]


class Counts(nn.Module):
    """Has extra state, a buffer that no checkpoint has, and a parameter in channels last."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.seen = int(value)
        self.register_buffer("step", torch.tensor(int(value)), persistent=False)
        weight = torch.arange(24.0).view(2, 3, 2, 2) + value
        self.weight = nn.Parameter(weight.to(memory_format=torch.channels_last))

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum() + self.step + self.seen


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Counts(1), Counts(2)
        self.same = [self.a.weight]  # held elsewhere as well

    def layers(self) -> list[Layer]:
        return [Layer("a", self.a), Layer("b", self.b)]

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.b(self.a(x)))) + self.same[0].sum()


def held(group: Any, model: Any, act: Callable[[WholeModel], Any], **more: Any) -> Any:
    staged = PipelineModel(model, mesh=Mesh.of(group, pipeline=2))
    with torch.no_grad():
        for layer in staged.own_layers().values():  # changed since it was given
            layer.seen, layer.weight = layer.seen * 10, nn.Parameter(layer.weight + 0.5)  # pyright: ignore
            layer.step += 3  # pyright: ignore
        whole = WholeModel(staged, Wire(staged.mesh.pipeline, torch.device("cpu")))
        contents = whole.gathered(ranks=more.pop("ranks", (0, 1)), **more)
        with whole.filled(contents):
            return act(whole)


def test_it_has_parameters_buffers_and_extra_state_of_all_ranks_as_they_are_now(on_ranks: OnRanks) -> None:
    wanted = Two()
    with torch.no_grad():
        for one in (wanted.a, wanted.b):
            one.weight += 0.5
            one.step += 3
            one.seen *= 10
        x = torch.ones(3)
        assert [
            one.tolist() for one in on_ranks(2, lambda group: held(group, Two(), lambda w: w.as_given.twice(x)))
        ] == [wanted.twice(x).tolist()] * 2


def test_tensors_keep_their_memory_format(on_ranks: OnRanks) -> None:
    def act(whole: WholeModel) -> Any:
        return [one.stride() for one in whole.as_given.parameters()]

    wanted = [one.stride() for one in Two().parameters()]
    assert wanted[0] != torch.empty(2, 3, 2, 2).stride()
    assert on_ranks(2, lambda group: held(group, Two(), act)) == [wanted, wanted]


def test_only_the_ranks_that_want_it_have_it(on_ranks: OnRanks) -> None:
    def act(whole: WholeModel) -> Any:
        return [one.numel() for one in whole.as_given.parameters()]

    assert on_ranks(2, lambda group: held(group, Two(), act, ranks=(1,))) == [[0, 0], [24, 24]]


@pytest.mark.parametrize("copied", [False, True])
def test_what_a_rank_holds_itself_is_put_in_as_it_is_or_copied(on_ranks: OnRanks, copied: bool) -> None:
    def act(group: Any) -> Any:
        def shares(whole: WholeModel) -> bool:
            mine = whole._model.own_layers()[name]
            return mine.weight.data_ptr() == whole.as_given.get_submodule(name).weight.data_ptr()  # pyright: ignore

        name = "ab"[group.rank]
        return held(group, Two(), shares, copied=copied)

    assert on_ranks(2, act) == [not copied] * 2


def test_outside_it_holds_nothing(on_ranks: OnRanks) -> None:
    def act(group: Any) -> Any:
        kept: list[WholeModel] = []
        held(group, Two(), kept.append)
        own = sum(one.numel() for one in kept[0]._model.parameters())
        given = kept[0].as_given
        gc.collect()
        everywhere = {id(one): one.numel() for one in (*given.parameters(), *given.buffers())}
        return own, sum(everywhere.values())

    assert on_ranks(2, act) == [(24, 0), (24, 0)]


def test_functions_are_called_when_it_is_wanted_first_and_not_before(on_ranks: OnRanks) -> None:
    def act(group: Any) -> Any:
        calls: list[int] = []

        def build(place: int) -> nn.Module:
            calls.append(place)
            return Counts(place)

        def values(whole: WholeModel) -> Any:
            before = list(calls)
            assert type(whole.as_given) is LayersInTurn and whole.as_given is whole.in_turn
            return before, calls, whole.as_given(torch.ones(1)).item()

        return held(group, [lambda: build(0), lambda: build(1)], values)

    first = (torch.arange(24.0) + 0.5).sum() + 3
    second = first * (torch.arange(24.0) + 1.5).sum() + 4 + 10
    for rank, (before, calls, value) in enumerate(on_ranks(2, act)):
        assert before == [rank, 0, 1] == calls
        assert value == second


def test_a_model_of_functions_goes_into_a_file_without_them() -> None:
    for build, unfit in (([lambda: nn.Linear(2, 2)], "comes out of a file"), (nn.Sequential(nn.Linear(2, 2)), "")):
        staged = PipelineModel(build)
        again: PipelineModel = pickle.loads(pickle.dumps(staged))
        assert unfit in again.outline.unfit and bool(unfit) == bool(again.outline.unfit)
        assert deepcopy(staged).outline is staged.outline and not staged.outline.unfit


def test_layers_alone_say_that_they_have_no_other_methods() -> None:
    staged = PipelineModel([nn.Linear(2, 2)])
    whole = WholeModel(staged, Wire(staged.mesh.pipeline, torch.device("cpu")))
    with pytest.raises(AttributeError, match=r"given as its layers, .* have no `generate`; give the model itself"):
        whole.as_given.generate  # noqa: B018
