"""Iterative product quantisation against a plain loop in float64; resumed, averaged, gone back; refusals."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantization_programs import GROUPS, POINTS, SpoilOnce, Square, Writes, data_for, net, sgd, spoil, trainer_of
from torch import Tensor, nn

from evenstep import (
    Ema,
    Engine,
    Failures,
    Fp16Mixed,
    Hook,
    Incident,
    Mesh,
    PipelineModel,
    Trainer,
    Training,
    load_weights,
)
from evenstep.errors import ArgumentError, NonFiniteError
from evenstep.events import StepEnd
from evenstep.extras.quantization import LayerGroup, ProductQuantization, compressed_state
from evenstep.extras.quantization.codebook import build_codebook
from evenstep.keys import key
from evenstep.parallel import Ddp, Group, Local, Ordered


def quantizing(
    model: nn.Module | None = None,
    *,
    updates: int = 7,
    hooks: Sequence[Hook] = (),
    gradient: Any = "mean",
    ema: Ema | None = None,
    **more: Any,
) -> Trainer:
    hook = ProductQuantization(GROUPS, gradient=gradient)
    options = {"updates": updates, "train": Training(ema=ema), **more}
    return trainer_of(model or net().double(), [hook, *hooks], **options)


def by_hand(updates: int, gradient: str) -> dict[str, Tensor]:
    """A plain loop: dense weights, whose gradient is summed over the blocks of each centroid in NumPy."""
    model = net().double()
    momentum: dict[str, Tensor] = {}
    books: dict[str, tuple[Tensor, np.ndarray]] = {}

    def stepped(name: str, value: Tensor, gradient: Tensor) -> Tensor:
        gradient = gradient + 0.1 * value
        momentum[name] = momentum[name] * 0.9 + gradient if name in momentum else gradient
        return value - 0.05 * momentum[name]

    for update in range(updates):
        some = [POINTS[n % 24] for n in range(update * 8, update * 8 + 8)]
        inputs, targets = (torch.stack([pair[part].double() for pair in some]) for part in (0, 1))
        model.zero_grad()
        (((model(inputs) - targets) ** 2).sum() / 8).backward()
        with torch.no_grad():
            for name, one in model.named_parameters():
                layer = name.removesuffix(".weight")
                if layer not in books or name.endswith("bias"):
                    one.copy_(stepped(name, one, one.grad))
                    continue
                centroids, assigned = books[layer]
                blocks = one.grad.numpy().reshape(len(assigned), -1)
                sums = np.zeros(centroids.shape)
                for block, k in zip(blocks, assigned, strict=True):
                    sums[k] += block / ((assigned == k).sum() if gradient == "mean" else 1)
                books[layer] = stepped(f"{layer}.centroids", centroids, torch.from_numpy(sums)), assigned
                one.copy_(books[layer][0][torch.from_numpy(assigned)].view_as(one))
            for group in GROUPS:
                if group.after_update == update + 1:
                    weight = model.get_submodule(group.layers[0]).weight
                    generator = torch.Generator().manual_seed(key(0, "codebook", group.layers[0]))
                    blocks = weight.reshape(-1, group.block_size)
                    made = build_codebook(blocks, group.num_centroids, iterations=15, generator=generator)
                    books[group.layers[0]] = made[0], made[1].numpy()
                    weight.copy_(made[0][made[1]].view_as(weight))
    centroids = {f"{layer}.centroids": book for layer, (book, _) in books.items()}
    return {**{name: one.detach() for name, one in model.named_parameters()}, **centroids}


@pytest.mark.parametrize("gradient", ["mean", "sum"])
def test_updates_are_those_of_a_plain_loop_before_between_and_after_the_layers_are_quantised(gradient: Any) -> None:
    for updates in (2, 3, 7):
        trainer = quantizing(updates=updates, gradient=gradient)
        trainer.train()
        made, wanted = trainer.state_dict()["model"], by_hand(updates, gradient)
        for name, value in wanted.items():
            torch.testing.assert_close(made[name], value, rtol=1e-12, atol=1e-12)


def staged(group: Group, split_at: str = "2", **more: Any) -> PipelineModel:
    return PipelineModel(net().double(), mesh=Mesh.of(group, pipeline=group.ranks), split_at=[split_at], **more)


@pytest.mark.parametrize("split_at", ["2", "3"])
def test_stages_quantise_their_own_layers_where_they_have_some(
    split_at: str, on_ranks: Callable[..., list[Any]]
) -> None:
    def act(group: Group) -> dict[str, Tensor]:
        model = staged(group, split_at, schedule="zb_h1")
        quantizing(model, strategy=Ordered(model.mesh.data), ema=Ema(decay=0.5)).train()
        return model.state_dict()

    wanted, found = by_hand(7, "mean"), on_ranks(2, act)
    assert ("2.centroids" in found[1]) == (split_at == "2")
    for name, value in [each for theirs in found for each in theirs.items() if each[0] in wanted]:
        torch.testing.assert_close(value, wanted.pop(name), rtol=1e-12, atol=1e-12)
    assert not wanted


def test_a_model_that_is_put_into_stages_after_it_was_prepared_is_quantised(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Group) -> list[str]:
        hook = ProductQuantization(GROUPS)
        hook.prepare(whole := net().double())
        model = PipelineModel(whole, mesh=Mesh.of(group, pipeline=2), split_at=["2"])
        data = data_for(model)
        Trainer(model=model, task=Square(), optimizer=sgd(model), data=data, updates=4, hooks=[hook]).train()
        return [name for name, one in model.named_buffers() if int(one.min()) >= 0]

    assert on_ranks(2, act) == [["0.assignments"], ["2.assignments"]]


def test_patterns_and_ties_are_looked_at_over_all_stages(on_ranks: Callable[..., list[Any]]) -> None:
    groups: list[list[dict[str, Any]]] = [
        [{"layers": ["0"], "after_update": 1}, {"layers": ["9"], "after_update": 1}],
        [{"layers": ["2"], "after_update": 1}, {"layers": ["*"], "after_update": 2}],
    ]

    def act(group: Group) -> list[str]:
        said: list[str] = []
        for given in groups:
            with pytest.raises(ArgumentError) as refused:
                ProductQuantization(given).prepare(staged(group))
            said.append(str(refused.value))
        return said

    first, second = on_ranks(2, act)
    assert first == second
    assert "'9', which fits no layer that can be quantised; near it are 0, 2, 4" in first[0]
    assert "`2` is in two groups" in first[1]
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    hook = ProductQuantization([{"layers": ["1"], "after_update": 1, "num_centroids": 4}])
    with pytest.raises(ArgumentError, match=r"`1.weight` is also `0.weight`"):
        hook.prepare(PipelineModel(tied, stages_per_rank=2))


def test_a_model_in_stages_is_compressed_as_the_refusal_says(
    tmp_path: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    def act(group: Group) -> None:
        model = staged(group)
        quantizing(model, folder=tmp_path).train()
        with pytest.raises(ArgumentError, match="build the model in one process, `prepare` it, load the checkpoint"):
            compressed_state(model)

    on_ranks(2, act)
    whole = net().double()
    ProductQuantization(GROUPS).prepare(whole)
    load_weights(whole, tmp_path)
    state, wanted = compressed_state(whole), by_hand(7, "mean")
    assert "2.weight" not in state and state["2.assignments"].dtype == torch.uint8
    built = state["2.centroids"][state["2.assignments"].long()].view(16, 16)
    torch.testing.assert_close(built, wanted["2.weight"], rtol=1e-12, atol=1e-12)


def test_the_weight_of_a_quantised_layer_holds_what_it_computes_with() -> None:
    trainer = quantizing()
    trainer.train()
    plain, state = net().double(), trainer.state_dict()["model"]
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    inputs = torch.stack([pair[0].double() for pair in POINTS])
    assert torch.equal(plain(inputs), trainer.model.eval()(inputs))
    assert len(state["0.weight"].reshape(-1, 4).unique(dim=0)) <= 6


def test_what_is_compressed_has_codebooks_in_the_place_of_weights() -> None:
    trainer = quantizing(updates=3)
    trainer.train()
    state = compressed_state(trainer.model)
    assert list(state) == ["0.bias", "0.centroids", "0.assignments", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert state["0.assignments"].dtype == torch.uint8
    built = state["0.centroids"][state["0.assignments"].long()].view(16, 8)
    assert torch.equal(built, trainer.state_dict()["model"]["0.weight"])


def test_optimizer_state_of_the_weight_goes_and_that_of_the_centroids_comes() -> None:
    trainer = quantizing(updates=2)
    trainer.train()
    assert "0.weight" not in trainer.state_dict()["optimizer"]["state"]
    trainer.updates = 3
    trainer.train()
    assert "0.centroids" in trainer.state_dict()["optimizer"]["state"]
    assert "0.weight" not in trainer.state_dict()["optimizer"]["state"]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_a_run_is_resumed_to_the_bit_before_between_and_after(stop: int, tmp_path: Path) -> None:
    def ema() -> Ema:
        return Ema(decay=0.5, every_updates=min(stop, 2))  # one that never moves is refused

    whole = quantizing(ema=ema())
    metrics = whole.train().metrics
    quantizing(folder=tmp_path, updates=stop, ema=ema()).train()
    resumed = quantizing(folder=tmp_path, ema=ema())
    resumed.resume()
    assert resumed.train().metrics["valid/loss"] == metrics["valid/loss"]
    assert_same(resumed.state_dict(), whole.state_dict())


def assert_same(left: Any, right: Any, parts: Sequence[str] = ("model", "optimizer", "ema", "trained")) -> None:
    for part in parts:
        check(left[part], right[part], part)


def check(left: Any, right: Any, place: str) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys(), place
        for name in left:
            check(left[name], right[name], f"{place}.{name}")
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), place
    elif isinstance(left, list):
        for one, other in zip(left, right, strict=True):
            check(one, other, place)
    else:
        assert left == right, place


def test_a_run_that_goes_back_to_before_a_layer_was_quantised_comes_to_the_same(tmp_path: Path) -> None:
    whole = quantizing()
    whole.train()

    back = quantizing(folder=tmp_path, hooks=[SpoilOnce()], failures=Failures(non_finite="rewind"))
    back.train()
    assert_same(back.state_dict(), whole.state_dict())


def test_an_update_whose_verdict_is_read_late_is_made_again_with_the_layer_as_it_was() -> None:
    def ended(settle: int) -> dict[str, Any]:
        model, overflows = net(), list[int]()

        class Count(Hook):
            def on_incident(self, event: Incident) -> None:
                overflows.append(event.update)

        trainer_of(
            model,
            [ProductQuantization([LayerGroup(layers=("0",), after_update=5, block_size=4, num_centroids=6)]), Count()],
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
            precision=Fp16Mixed(initial=2.0**14, growth_updates=1),  # which grows until an update overflows
            train=Training(settle_every_updates=settle, check_loss=False),
            evaluations={},
        ).train()
        assert 5 in overflows, overflows
        return model.state_dict()

    at_once, late = ended(1), ended(6)
    assert all(torch.equal(at_once[name], late[name]) for name in at_once)


@pytest.mark.parametrize("settle", [1, 6])
def test_what_is_found_when_a_verdict_is_read_ends_the_run_also_where_failing_hooks_do_not(settle: int) -> None:
    class Spoil(Hook):
        def after_step(self, event: StepEnd) -> None:
            if event.update == 3:
                spoil(self.trainer.model)

    options = Training(settle_every_updates=settle, check_loss=False)
    trainer = quantizing(
        hooks=[Spoil()], train=options, failures=Failures(hook="continue"), optimizer=partial(sgd, fused=True)
    )
    with pytest.raises(NonFiniteError, match="update 4"):
        trainer.train()


def test_the_average_of_what_is_quantised_begins_anew_and_is_that_of_the_centroids() -> None:
    trainer = quantizing(updates=2, ema=Ema(decay=0.5))
    trainer.train()
    state = trainer.state_dict()
    for name in ("0.weight", "0.centroids", "0.assignments"):
        assert torch.equal(state["ema"][name], state["model"][name]), name
    assert not torch.equal(state["ema"]["2.weight"], state["model"]["2.weight"])
    before = state["ema"]["0.centroids"].clone()
    trainer.updates = 3
    trainer.train()
    state = trainer.state_dict()
    average = state["ema"]["0.centroids"]
    torch.testing.assert_close(average, (before + state["model"]["0.centroids"]) / 2, rtol=1e-12, atol=1e-12)
    built = average[state["ema"]["0.assignments"].long()].view(16, 8)
    torch.testing.assert_close(state["ema"]["0.weight"], built, rtol=1e-12, atol=1e-12)


def test_the_codebook_of_a_frozen_layer_is_frozen_too() -> None:
    trainer = quantizing(updates=2)
    trainer.model[0].weight.requires_grad_(False)
    trainer.train()
    before = trainer.model[0].centroids.detach().clone()
    trainer.updates = 4
    trainer.train()
    assert torch.equal(trainer.model[0].centroids, before) and before.any()
    assert trainer.model[2].centroids.requires_grad


def test_embeddings_and_convolutions_are_quantised_by_rows() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(12, 4, padding_idx=0), "conv": nn.Conv2d(2, 6, 3)})
    hook = ProductQuantization([{"layers": ["*"], "after_update": 0, "block_size": 2, "num_centroids": 5}], seed=1)
    hook.prepare(model)
    for name, shape in (("embed", (12, 4)), ("conv", (6, 2, 3, 3))):
        layer: Any = model[name]
        weight = layer.dense.detach().clone()
        made = build_codebook(weight.reshape(-1, 2), 5, iterations=9, generator=torch.Generator().manual_seed(1))
        layer.quantize(*made)
        assert layer.weight.shape == shape and torch.equal(layer.weight.reshape(-1, 2), made[0].float()[made[1]])
    output = model["conv"](torch.randn(1, 2, 5, 5)).sum() + model["embed"](torch.tensor([0, 3])).sum()
    output.backward()
    assert all(model[name].centroids.grad is not None and model[name].dense.grad is None for name in ("embed", "conv"))


def test_a_copy_and_loaded_weights_are_quantised_as_the_model_is() -> None:
    trainer = quantizing()
    trainer.train()
    inputs = torch.stack([pair[0].double() for pair in POINTS])
    wanted = trainer.model.eval()(inputs)
    assert torch.equal(copy.deepcopy(trainer.model)(inputs), wanted)
    other = net().double()
    ProductQuantization(GROUPS).prepare(other)
    before = other(inputs)
    assert torch.equal(before, net().double()(inputs))
    other.load_state_dict(trainer.model.state_dict())
    assert torch.equal(other(inputs), wanted)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([], "at least one `LayerGroup`"),
        ([{"layers": ["0"]}], "must be given `after_update` too|`layers`, `after_update`"),
        ([{"layers": ["9"], "after_update": 1}], "'9', which fits no layer that can be quantised; near it are 0, 2, 4"),
        ([{"layers": ["1", "0"], "after_update": 1}], "'1', which fits no layer"),
        ([{"layers": ["0"], "after_update": 1, "block_size": 3}], "rows of 8 numbers, which blocks of 3 do not divide"),
        ([{"layers": ["4"], "after_update": 1}], "4 blocks of 8, fewer than 256 centroids"),
        (
            [{"layers": ["0"], "after_update": n, "block_size": 4, "num_centroids": 2} for n in (1, 2)],
            "`0` is in two groups",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        ProductQuantization(groups).prepare(net())


def test_a_weight_that_another_layer_has_too_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    hook = ProductQuantization([{"layers": ["0"], "after_update": 1, "block_size": 4, "num_centroids": 4}])
    with pytest.raises(ArgumentError, match=r"`0.weight` is also `1.weight`"):
        hook.prepare(model)


def test_layers_of_other_classes_are_not_taken() -> None:
    class Own(nn.Linear):
        pass

    hook = ProductQuantization([{"layers": ["0"], "after_update": 1, "block_size": 4, "num_centroids": 4}])
    with pytest.raises(ArgumentError, match="`0` is a Own, but quantised can be Linear, Embedding, Conv1d, Conv2d"):
        hook.prepare(nn.Sequential(Own(8, 8)))


@pytest.mark.parametrize(
    ("prepares", "said"),
    [
        (False, r"'0', which fits no layer that was prepared: call `prepare\(model\)`"),
        (True, "the optimizer does not hold `0.centroids`.* build it after `prepare"),
    ],
)
def test_a_model_that_was_not_prepared_or_too_late_is_refused_when_the_trainer_is_built(
    prepares: bool, said: str
) -> None:
    model, hook = net(), ProductQuantization(GROUPS)
    optimizer = sgd(model)
    if prepares:
        hook.prepare(model)
    with pytest.raises(ArgumentError, match=said):
        Trainer(model=model, task=Square(), optimizer=optimizer, data=data_for(model), updates=2, hooks=[hook])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"strategy": Local(Ddp(Group()))}, "`0` is a ProductQuantizedLinear, .* differ where ranks step alone"),
        ({"precision": "bf16-true"}, "whose weight follows centroids in float32"),
        ({"train": Training(compile="model")}, "another layer from a set update on"),
        ({"train": Training(compile="update")}, "another layer from a set update on"),
        ({"model": PipelineModel(net()), "task": Writes()}, "whose codebook the whole model, put together of stages"),
    ],
)
def test_runs_that_it_is_not_for_are_refused_by_name(more: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        quantizing(more.pop("model", None) or net(), **more)


def test_an_engine_refuses_them_too() -> None:
    model = net()
    ProductQuantization(GROUPS).prepare(model)
    with pytest.raises(ArgumentError, match="leave `compile` out"):
        Engine(model, Square(), sgd(model), train=Training(compile="model"))
