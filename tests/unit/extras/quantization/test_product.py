"""Iterative product quantisation against a plain loop in float64; resumed, averaged, gone back; refusals."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep import (
    Checkpointing,
    Ema,
    Engine,
    Failures,
    Fp16Mixed,
    Hook,
    Incident,
    Logging,
    MapData,
    Task,
    Trainer,
    Training,
)
from evenstep.errors import ArgumentError, NonFiniteError
from evenstep.events import StepEnd, UpdateEnd
from evenstep.extras.quantization import LayerGroup, ProductQuantization, compressed_state
from evenstep.extras.quantization.codebook import build_codebook
from evenstep.keys import key
from evenstep.parallel import Ddp, Fsdp, Group, Local

POINTS = [
    (
        torch.randn(8, generator=(draw := torch.Generator().manual_seed(n))).double(),
        torch.randn(2, generator=draw).double(),
    )
    for n in range(24)
]
GROUPS = (
    LayerGroup(layers=("0",), after_update=2, block_size=4, num_centroids=6),
    LayerGroup(layers=("2",), after_update=4, block_size=8, num_centroids=5),
)


class Square(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def trainer_of(
    folder: Path | None = None,
    *,
    updates: int = 7,
    hooks: Sequence[Hook] = (),
    gradient: Any = "mean",
    ema: Ema | None = None,
    fused: bool = False,
    **more: Any,
) -> Trainer:
    model = net()
    hook = ProductQuantization(GROUPS, gradient=gradient)
    hook.prepare(model)
    given = MapData(POINTS, global_batch_size=8, micro_batch_size=4, shuffle=False)
    options: dict[str, Any] = {"train": Training(ema=ema), "data": given, "evaluations": {"valid": given}, **more}
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, fused=fused),
        updates=updates,
        device="cpu",
        folder=folder,
        hooks=[hook, *hooks],
        checkpoint=Checkpointing(asynchronous=False),
        log=Logging(writers=()),
        **options,
    )


def by_hand(updates: int, gradient: str) -> dict[str, Tensor]:
    """A plain loop: dense weights, whose gradient is summed over the blocks of each centroid in NumPy."""
    model = net()
    momentum: dict[str, Tensor] = {}
    books: dict[str, tuple[Tensor, np.ndarray]] = {}

    def stepped(name: str, value: Tensor, gradient: Tensor) -> Tensor:
        gradient = gradient + 0.1 * value
        momentum[name] = momentum[name] * 0.9 + gradient if name in momentum else gradient
        return value - 0.05 * momentum[name]

    for update in range(updates):
        some = [POINTS[n % 24] for n in range(update * 8, update * 8 + 8)]
        inputs, targets = (torch.stack([pair[part] for pair in some]) for part in (0, 1))
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
        trainer = trainer_of(updates=updates, gradient=gradient)
        trainer.train()
        made, wanted = trainer.state_dict()["model"], by_hand(updates, gradient)
        for name, value in wanted.items():
            torch.testing.assert_close(made[name], value, rtol=1e-12, atol=1e-12)


def test_the_weight_of_a_quantised_layer_holds_what_it_computes_with() -> None:
    trainer = trainer_of()
    trainer.train()
    plain, state = net(), trainer.state_dict()["model"]
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    inputs = torch.stack([pair[0] for pair in POINTS])
    assert torch.equal(plain(inputs), trainer.model.eval()(inputs))
    assert len(state["0.weight"].reshape(-1, 4).unique(dim=0)) <= 6


def test_what_is_compressed_has_codebooks_in_the_place_of_weights() -> None:
    trainer = trainer_of(updates=3)
    trainer.train()
    state = compressed_state(trainer.model)
    assert list(state) == ["0.bias", "0.centroids", "0.assignments", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert state["0.assignments"].dtype == torch.uint8
    built = state["0.centroids"][state["0.assignments"].long()].view(16, 8)
    assert torch.equal(built, trainer.state_dict()["model"]["0.weight"])


def test_optimizer_state_of_the_weight_goes_and_that_of_the_centroids_comes() -> None:
    trainer = trainer_of(updates=2)
    trainer.train()
    assert "0.weight" not in trainer.state_dict()["optimizer"]["state"]
    trainer.updates = 3
    trainer.train()
    assert "0.centroids" in trainer.state_dict()["optimizer"]["state"]
    assert "0.weight" not in trainer.state_dict()["optimizer"]["state"]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_a_run_is_resumed_to_the_bit_before_between_and_after(stop: int, tmp_path: Path) -> None:
    whole = trainer_of(ema=Ema(decay=0.5, every_updates=2))
    metrics = whole.train().metrics
    trainer_of(tmp_path, updates=stop, ema=Ema(decay=0.5, every_updates=2)).train()
    resumed = trainer_of(tmp_path, ema=Ema(decay=0.5, every_updates=2))
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
    whole = trainer_of()
    whole.train()

    class Spoil(Hook):
        """Makes the gradient of update 5 not finite, once."""

        is_done = False

        def after_update(self, event: UpdateEnd) -> None:
            if event.update == 1:
                self.trainer.request_save()

        def after_step(self, event: StepEnd) -> None:
            if event.update == 4 and not self.is_done:
                self.is_done = True
                with torch.no_grad():
                    self.trainer.model[4].bias[0] = float("nan")

    back = trainer_of(tmp_path, hooks=[Spoil()], failures=Failures(non_finite="rewind"))
    back.train()
    assert_same(back.state_dict(), whole.state_dict())


def test_an_update_whose_verdict_is_read_late_is_made_again_with_the_layer_as_it_was() -> None:
    def ended(settle: int) -> dict[str, Any]:
        model, overflows = net().float(), list[int]()
        hook = ProductQuantization([LayerGroup(layers=("0",), after_update=3, block_size=4, num_centroids=6)])
        hook.prepare(model)

        class Count(Hook):
            def on_incident(self, event: Incident) -> None:
                overflows.append(event.update)

        Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
            data=MapData([(x.float(), y.float()) for x, y in POINTS], global_batch_size=8),
            updates=6,
            device="cpu",
            hooks=[hook, Count()],
            precision=Fp16Mixed(initial=2.0**14, growth_updates=1),  # which grows until an update overflows
            train=Training(settle_every_updates=settle, check_loss=False),
            log=Logging(writers=()),
        ).train()
        assert 3 in overflows, overflows
        return model.state_dict()

    at_once, late = ended(1), ended(4)
    assert all(torch.equal(at_once[name], late[name]) for name in at_once)


@pytest.mark.parametrize("settle", [1, 6])
def test_what_is_found_when_a_verdict_is_read_ends_the_run_also_where_failing_hooks_do_not(settle: int) -> None:
    class Spoil(Hook):
        def after_step(self, event: StepEnd) -> None:
            if event.update == 3:
                with torch.no_grad():
                    self.trainer.model[4].bias[0] = float("nan")

    options = Training(settle_every_updates=settle, check_loss=False)
    trainer = trainer_of(hooks=[Spoil()], train=options, failures=Failures(hook="continue"), fused=True)
    with pytest.raises(NonFiniteError, match="update 4"):
        trainer.train()


def test_the_average_of_what_is_quantised_begins_anew_and_is_that_of_the_centroids() -> None:
    trainer = trainer_of(updates=2, ema=Ema(decay=0.5))
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
    trainer = trainer_of(updates=2)
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
    trainer = trainer_of()
    trainer.train()
    inputs = torch.stack([pair[0] for pair in POINTS])
    wanted = trainer.model.eval()(inputs)
    assert torch.equal(copy.deepcopy(trainer.model)(inputs), wanted)
    other = net()
    ProductQuantization(GROUPS).prepare(other)
    before = other(inputs)
    assert torch.equal(before, net()(inputs))
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


def bare(model: nn.Module, optimizer: torch.optim.Optimizer, hooks: Sequence[Hook], **more: Any) -> Trainer:
    data = MapData(POINTS, global_batch_size=8)
    return Trainer(
        model=model, task=Square(), optimizer=optimizer, data=data, updates=2, device="cpu", hooks=hooks, **more
    )


def test_a_model_that_was_not_prepared_or_too_late_is_refused_when_the_trainer_is_built() -> None:
    model, hook = net(), ProductQuantization(GROUPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"`0` of the model is a Linear yet; call `prepare\(model\)`"):
        bare(model, optimizer, [hook])
    hook.prepare(model)
    with pytest.raises(ArgumentError, match=r"the optimizer does not hold `0.centroids`.* build it after `prepare"):
        bare(model, optimizer, [hook])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"strategy": Fsdp(Group())}, "`0` is a ProductQuantizedLinear, whose codebook .* ranks of `fsdp` hold parts"),
        ({"strategy": Local(Ddp(Group()))}, "differ where ranks step alone"),
        ({"precision": "bf16-true"}, "whose weight follows centroids in float32"),
        ({"train": Training(compile="model")}, "another layer from a set update on"),
        ({"train": Training(compile="update")}, "another layer from a set update on"),
    ],
)
def test_runs_that_it_is_not_for_are_refused_by_name(more: Any, said: str) -> None:
    model, hook = net().float(), ProductQuantization(GROUPS)
    hook.prepare(model)
    with pytest.raises(ArgumentError, match=said):
        bare(model, torch.optim.SGD(model.parameters(), lr=0.1), [hook], **more)


def test_an_engine_refuses_them_too() -> None:
    model, hook = net().float(), ProductQuantization(GROUPS)
    hook.prepare(model)
    with pytest.raises(ArgumentError, match="leave `compile` out"):
        Engine(model, Square(), torch.optim.SGD(model.parameters(), lr=0.1), train=Training(compile="model"))
