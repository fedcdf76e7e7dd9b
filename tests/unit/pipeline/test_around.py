"""What a model has around its layers, and what a layer is called with: refused by name where stages would go wrong."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Task
from evenstep.errors import ArgumentError, EvenstepError, TaskError
from evenstep.parallel import Mesh, Single
from evenstep.pipeline import Layer, PipelineModel
from evenstep.pipeline.layers import arguments


class Around(nn.Module):
    """Two layers, and whatever a test puts around them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.first, self.body.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def layers(self) -> list[Layer]:
        return [Layer("body.first", self.body.first), Layer("body.last", self.body.last)]


@pytest.mark.parametrize("part", ["", "body"])
@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
    ],
)
def test_hooks_around_the_layers_are_refused_and_on_a_layer_they_are_called(part: str, register: Any) -> None:
    model = Around()
    handle = register(model.get_submodule(part))
    with pytest.raises(ArgumentError, match=r"nothing around them, .* has hooks, .* \(body.first … body.last\)"):
        PipelineModel(model, stages_per_rank=2)
    handle.remove()
    called: list[int] = []
    model.body.first.register_forward_hook(lambda *_: called.append(1))
    PipelineModel(model, stages_per_rank=2)(torch.ones(1, 2))
    assert called == [1]


def test_hooks_of_a_chain_are_refused_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model.register_forward_hook(lambda module, given, output: output * 2)
    with pytest.raises(ArgumentError, match="it has hooks"):
        PipelineModel(model, stages_per_rank=2)


def test_a_saved_buffer_that_no_layer_holds_is_refused_and_the_advice_works() -> None:
    model = Around()
    model.body.register_buffer("scale", torch.ones(1))
    with pytest.raises(ArgumentError, match=r"its `body` has the buffer `scale`, .*persistent=False"):
        PipelineModel(model, stages_per_rank=2)
    model.body.register_buffer("scale", torch.ones(1), persistent=False)
    PipelineModel(model, stages_per_rank=2)
    model.body.register_buffer("scale", torch.ones(1))
    model.body.first.register_buffer("scale", model.body.scale)
    PipelineModel(model, stages_per_rank=2)


class Stateful(Around):
    def get_extra_state(self) -> Tensor:
        return torch.ones(1)


def test_extra_state_that_no_layer_holds_is_refused_and_that_of_a_layer_is_saved() -> None:
    with pytest.raises(ArgumentError, match="all that checkpoints have of it, but it has a `get_extra_state`, which"):
        PipelineModel(Stateful(), stages_per_rank=2)
    layers = [Layer("first", Stateful()), Layer("last", nn.Linear(2, 1))]
    assert "first._extra_state" in PipelineModel(layers, stages_per_rank=2).state_dict()


def test_an_input_that_the_task_does_not_give_is_named() -> None:
    with pytest.raises(ArgumentError, match="the input 'mask', but the task's `inputs` gives x"):
        arguments([], {"x": 1}, ("mask",))


class Two(nn.Module):
    """Takes two outputs."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


def test_a_layer_that_does_not_take_what_it_gets_is_named_with_what_that_is() -> None:
    layers = [nn.Linear(2, 2), Layer("sum", Two()), nn.Linear(2, 1)]
    with pytest.raises(TaskError, match=r"layer 'sum' \(Two\) can't be called with outputs of 0: missing .* 'right'"):
        PipelineModel(layers, stages_per_rank=2)(torch.ones(3, 2))
    layers[1] = Layer("sum", Two(), sources=("0", "0"))
    assert PipelineModel(layers, stages_per_rank=2)(torch.ones(3, 2)).shape == (3, 1)


class Sum(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return output.sum()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stage_that_begins_with_a_change_in_place_is_refused_and_the_advice_works(
    on_ranks: Callable[..., list[Any]], ranks: int
) -> None:
    def update(inplace: bool, begin: str) -> None:
        def act(group: Any) -> None:
            mesh = None if group is None else Mesh.of(group, pipeline=2)
            chain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=inplace), nn.Linear(2, 1))
            model = PipelineModel(chain, mesh=mesh, split_at=[begin], stages_per_rank=3 - ranks)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            strategy = None if mesh is None else Single(mesh.data)
            Engine(model, Sum(), optimizer, strategy=strategy, device="cpu").update(torch.ones(3, 2))

        act(None) if ranks == 1 else on_ranks(ranks, act)

    with pytest.raises(EvenstepError, match=r"layer '1' \(ReLU\) takes what comes from another stage, .*in place"):
        update(True, "1")
    update(True, "2")
    update(False, "1")


class Inverted(nn.Module):
    """Reads an inverted mask."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = given
        return x * (~mask if self.copies else mask.logical_not_())


class Masked(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x > 1


class Kept(nn.Module):
    def forward(self, x: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        return x + given[0] * given[1]


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
def test_what_a_later_stage_takes_may_not_be_changed_in_place_and_the_advice_works(grad: Any) -> None:
    def output(copies: bool, *begins: str, **more: Any) -> Tensor:
        last = Layer("last", Kept(), sources=("inverted", "masked"))
        layers = [Layer("masked", Masked()), Layer("inverted", Inverted(copies)), last]
        return PipelineModel(layers, stages_per_rank=len(begins) + 1, split_at=begins, **more)(torch.arange(3.0))

    with grad():
        with pytest.raises(
            TaskError, match=r"layer 'masked' gives was changed in place .* \(by 'inverted'\), but a later"
        ):
            output(False, "inverted", "last")
        assert output(True, "inverted", "last").tolist() == [0.0, 1.0, 2.0]
        written = [0.0, 2.0, 0.0]  # the last layer, too, reads the inverted mask, as without stages
        assert output(False, "inverted").tolist() == output(False, "last").tolist() == written


class Halved(nn.Module):
    """Halves what it is given, in place unless a copy is made."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 if self.copies else x.div_(2)


class Restored(Task):
    """The output is to be what the batch is; `writes` is the method that doubles the batch first."""

    def __init__(self, writes: str = "") -> None:
        self.writes = writes

    def transform(self, batch: Any) -> Any:
        return {"x": batch["x"].mul_(2)} if self.writes == "transform" else batch

    def inputs(self, batch: Any) -> Any:
        if self.writes == "inputs":
            batch["x"] = batch["x"] * 2
        return batch["x"]

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch["x"]) ** 2).sum()


def restored(on_ranks: Callable[..., list[Any]], task: Task, schedule: str, *, copies: bool = True) -> list[Any]:
    """The weight of the last layer after an update, on one process without stages, and on two ranks."""
    torch.manual_seed(0)
    chains = [nn.Sequential(Halved(copies), nn.Tanh(), nn.Tanh(), nn.Linear(2, 2)) for _ in range(3)]
    for chain in chains[1:]:
        chain.load_state_dict(chains[0].state_dict())

    def act(group: Any) -> list[Any]:
        chain = chains[-1 if group is None else group.rank]
        mesh = None if group is None else Mesh.of(group, pipeline=2)
        model = chain if mesh is None else PipelineModel(chain, mesh=mesh, schedule=schedule)
        optimizer = torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1)
        strategy = None if mesh is None else Single(mesh.data)
        engine = Engine(model, deepcopy(task), optimizer, strategy=strategy, device="cpu")
        engine.update({"x": torch.ones(3, 2)}, {"x": torch.full((2, 2), 2.0)})
        return [one.tolist() for one in model.parameters()]

    return [act(None), *(one for one in on_ranks(2, act) if one)]


class Filled(Task):
    """Masked numbers are to be restored; the mask is drawn in the method `draws`."""

    def __init__(self, draws: str) -> None:
        self.draws, self.mask = draws, torch.zeros(1, dtype=torch.bool)

    def drawn(self, method: str, x: Tensor) -> None:
        if self.draws == method:
            self.mask = x * 7 % 3 < 1

    def transform(self, batch: Any) -> Any:
        self.drawn("transform", batch["x"])
        return batch

    def inputs(self, batch: Any) -> Any:
        self.drawn("inputs", batch["x"])
        return batch["x"] * ~self.mask

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch["x"]) ** 2 * self.mask).sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_what_inputs_leave_in_the_task_for_the_loss_is_refused_in_stages_and_the_advice_works(
    on_ranks: Callable[..., list[Any]], schedule: str
) -> None:
    with pytest.raises(TaskError, match=r"stage 0 has left a tensor in `Filled.mask`, in `Filled.inputs` or"):
        restored(on_ranks, Filled("inputs"), schedule)
    alone, *staged = restored(on_ranks, Filled("transform"), schedule)
    assert staged == [alone]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_stage_that_writes_into_the_batch_is_refused_and_the_advice_works(
    on_ranks: Callable[..., list[Any]], schedule: str
) -> None:
    for writes, copies in [("inputs", True), ("", False)]:
        with pytest.raises(TaskError, match=r"stage 0 has written into the batch \(x\), in `Restored.inputs` or in a"):
            restored(on_ranks, Restored(writes), schedule, copies=copies)
    for writes in ("", "transform"):
        alone, *staged = restored(on_ranks, Restored(writes), schedule)
        assert staged == [alone]


class Normed(nn.Module):
    """A body whose norm stays in evaluation mode by a `train` of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.0))
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def layers(self) -> list[Layer]:
        return [*(Layer(f"body.{place}", part) for place, part in enumerate(self.body)), Layer("head", self.head)]

    def train(self, mode: bool = True) -> "Normed":
        super().train(mode)
        self.body[1].eval()
        return self


@pytest.mark.parametrize("staged", [False, True])
def test_a_train_of_the_models_own_is_called_and_what_is_in_evaluation_mode_stays_so(staged: bool) -> None:
    whole = Normed()
    whole.body[2].eval()
    model = PipelineModel(whole, stages_per_rank=2) if staged else whole
    engine = Engine(model, Sum(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    for _ in range(2):
        engine.update(torch.arange(6.0).view(3, 2))
        engine.evaluate(torch.ones(3, 2))
    assert [part.training for part in whole.body] == [True, False, False]
    assert model.training
    assert torch.equal(whole.body[1].running_mean, torch.zeros(2))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_a_train_of_the_models_own_is_called_also_where_the_model_comes_in_evaluation_mode(
    staged: bool, around: bool
) -> None:
    own = Normed()
    whole = (nn.Sequential(own, nn.Identity()) if around else own).eval()
    model = PipelineModel(whole, stages_per_rank=2) if staged else whole
    engine = Engine(model, Sum(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    engine.update(torch.arange(6.0).view(3, 2))
    assert model.training
    assert [part.training for part in own.body] == [True, False, True]
    assert torch.equal(own.body[1].running_mean, torch.zeros(2))


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained_in_stages_as_it_is_whole() -> None:
    for staged in (False, True):
        whole = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1)).eval()
        model = PipelineModel(whole, stages_per_rank=2) if staged else whole
        assert not model.training
        Engine(model, Sum(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
        assert all(part.training for part in whole)
