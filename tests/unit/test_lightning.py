"""A LightningModule as it is: the adapter gives the same updates as Lightning where both are right, or refuses by name.

Lightning is in the extra `dev`.
"""

import importlib
import logging
import re
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.errors import ArgumentError, EvenstepError, NonFiniteError, TaskError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning: Any = pytest.importorskip("lightning.pytorch")
    torchmetrics: Any = pytest.importorskip("torchmetrics")

_DRAWN = torch.Generator().manual_seed(0)
INPUTS = torch.randn(48, 6, generator=_DRAWN)
CLASSES = INPUTS[:, :3].argmax(-1)
EPOCHS, GLOBAL, MICRO = 3, 16, 4


class Classifier(lightning.LightningModule):
    """What Lightning's own introduction looks like."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        self.log("val_loss", cross_entropy(output, batch[1]))
        self.log_dict({"accuracy": (output.argmax(-1) == batch[1]).float().mean()})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _with(**members: Any) -> Any:
    return type("Own", (Classifier,), members)()


def _rates(make: Callable[..., Any], **table: Any) -> Any:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **table}}

    return configure_optimizers


def _trainer(module: Any, micro: int = MICRO, **options: Any) -> evenstep.Trainer:
    dataset = TensorDataset(INPUTS, CLASSES)
    data = evenstep.MapData(dataset, global_batch_size=GLOBAL, micro_batch_size=micro, shuffle=False)
    asked = {key: options.pop(key) for key in ("updates", "count", "without") if key in options}
    given = evenstep.lightning.parts(module, **asked)
    return evenstep.Trainer(**given, data=data, device="cpu", **{"epochs": EPOCHS, **options})


def _by_lightning(module: Any, *, epochs: int = EPOCHS) -> Any:
    """Lightning's own trainer, the same batches in the same order."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=GLOBAL // MICRO,
        gradient_clip_val=0.5,
        accelerator="cpu",
        **dict.fromkeys(silent, False),
    )
    dataset = TensorDataset(INPUTS, CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(dataset, MICRO), DataLoader(dataset, len(INPUTS)))
    return trainer


def _wrapped(optimizer: Any) -> Any:
    return importlib.import_module("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer)


def _as_lists(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
    return [[optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]]


SCHEDULERS: dict[str, Any] = {
    "none": Classifier.configure_optimizers,
    "a list of two lists": _as_lists,
    "by epoch": _rates(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)),
    "every second epoch": _rates(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), frequency=2),
    "by update": _rates(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9), interval="step"),
    "warm-up": _rates(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
        interval="step",
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_it_trains_as_lightning_does_where_batches_are_of_one_size(name: str) -> None:
    theirs, ours = (_with(configure_optimizers=SCHEDULERS[name]) for _ in range(2))
    reference = _by_lightning(theirs)
    evaluations = DataLoader(TensorDataset(INPUTS, CLASSES), 20)  # of another size, which does not matter
    trainer = _trainer(ours, train=evenstep.Training(clip_norm=0.5), evaluations=evaluations)
    metrics = trainer.train().metrics
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=2e-7)
    for ours_name, theirs_name in (("valid/loss", "val_loss"), ("valid/accuracy", "accuracy")):
        assert metrics[ours_name] == pytest.approx(float(reference.callback_metrics[theirs_name]), abs=1e-6)
    assert trainer.model.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("micro", [1, 3, 16])
def test_a_last_short_micro_batch_counts_by_its_samples(micro: int) -> None:
    """The update is that of the whole global batch, where Lightning takes the mean of means."""
    whole, cut = Classifier().double(), Classifier().double()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    dataset = TensorDataset(INPUTS[:40].double(), CLASSES[:40])
    for part in (slice(0, 16), slice(16, 32), slice(32, 40)):
        optimizer.zero_grad()
        cross_entropy(whole(dataset.tensors[0][part]), dataset.tensors[1][part]).backward()
        optimizer.step()
    data = evenstep.MapData(dataset, global_batch_size=16, micro_batch_size=micro, shuffle=False)
    evenstep.Trainer(**evenstep.lightning.parts(cut), data=data, epochs=1, device="cpu").train()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_sum_in_the_place_of_the_mean_is_found_before_the_first_update() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self(batch[0]), batch[1], reduction="sum")

    with pytest.raises(TaskError, match=r"the losses of its two halves .* `Own.loss` gives as a mean what is a sum"):
        _trainer(_with(training_step=step)).train()


def test_a_mean_over_some_of_the_samples_is_exact_with_their_count() -> None:
    def counted(batch: Any) -> Tensor:
        return batch[1] != 2

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self(batch[0]), batch[1], ignore_index=2)

    whole, cut = _with(training_step=step), _with(training_step=step)
    _trainer(whole, GLOBAL, count=lambda batch: counted(batch).sum()).train()
    _trainer(cut, 3, count=lambda batch: counted(batch).sum()).train()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_two_ranks_have_the_bits_of_one(on_ranks: Any) -> None:
    alone, evaluations = Classifier(), DataLoader(TensorDataset(INPUTS, CLASSES), 16)
    metrics = _trainer(alone, strategy=evenstep.Ordered(), evaluations=evaluations).train().metrics
    modules = [Classifier(), Classifier()]

    def act(group: Any) -> Any:
        strategy = evenstep.Ordered(group)
        return _trainer(modules[group.rank], strategy=strategy, evaluations=evaluations).train().metrics

    ranks = on_ranks(2, act)
    for module in modules:
        for one, other in zip(alone.parameters(), module.parameters(), strict=True):
            assert torch.equal(one, other)
    for name in ("valid/loss", "valid/accuracy", "train/train_loss"):
        assert ranks[0][name] == pytest.approx(metrics[name], rel=1e-6)


def test_a_scheduler_moves_the_rates_of_several_optimizers_in_one() -> None:
    def configure_optimizers(self: Any) -> Any:
        first, last = self.net[0].parameters(), self.net[2].parameters()
        optimizer = evenstep.optim.MultiOptimizer(torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(last, lr=0.01))
        return [optimizer], [_exponential(optimizer)]

    trainer = _trainer(_with(configure_optimizers=configure_optimizers))
    trainer.train()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.1 / 4, 0.01 / 4]


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_it_resumes_exactly(tmp_path: Any, interval: str) -> None:
    schedule = _rates(lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 9), interval=interval)
    undisturbed, begun, gone_on = (_with(configure_optimizers=schedule) for _ in range(3))
    _trainer(undisturbed, epochs=3).train()
    first = _trainer(begun, folder=tmp_path, log=evenstep.Logging(writers=()), hooks=_StopAt())
    assert first.train().update == 4
    last = _trainer(gone_on, folder=tmp_path, log=evenstep.Logging(writers=()))
    last.resume()
    last.train()
    for one, other in zip(undisturbed.parameters(), gone_on.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_loop_that_loads_a_state_goes_on_at_the_rates_of_the_scheduler() -> None:
    schedule = _rates(lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.5), interval="step")
    one, other = (
        evenstep.Engine(**evenstep.lightning.parts(_with(configure_optimizers=schedule)), device="cpu")
        for _ in range(2)
    )
    one.update((INPUTS, CLASSES))
    other.load_state_dict(one.state_dict())
    for _ in range(2):
        other.update((INPUTS, CLASSES))
    assert other.optimizer.param_groups[0]["lr"] == 1e-2 / 4


class _StopAt(evenstep.Hook):
    def after_update(self, event: Any) -> None:
        if event.update == 4:
            self.trainer.request_stop("enough")


def test_a_step_that_is_told_apart_by_dict_and_without_a_number_works() -> None:
    def step(self: Any, batch: Any) -> Any:
        return {"loss": cross_entropy(self(batch[0]), batch[1]), "output": 1}

    steps: list[int] = []

    def validation_step(self: Any, batch: Any, batch_idx: int) -> Any:
        steps.append(self.global_step)
        return cross_entropy(self(batch[0]), batch[1])

    module = _with(training_step=step, validation_step=validation_step)
    data = DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    assert "valid/loss" in _trainer(module, evaluations=data).train().metrics
    assert {*steps} == {9}


@pytest.mark.parametrize("logged", [Tensor.clone, Tensor.item, Tensor.double])
def test_a_loss_of_one_element_is_a_loss_and_may_be_logged_as_it_is_in_any_way(logged: Any) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", logged(loss.detach()))
        return loss.view(1)

    def broken(self: Any, batch: Any, batch_idx: int) -> Any:
        return step(self, (batch[0] * torch.nan, batch[1]), batch_idx)

    plain, module = Classifier(), _with(training_step=step)
    for each in (plain, module):
        _trainer(each, epochs=1).train()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), module.parameters(), strict=True))
    with pytest.raises(NonFiniteError):
        _trainer(_with(training_step=broken)).train()


def _manual(self: Any) -> None:
    Classifier.__init__(self)
    self.automatic_optimization = False


def _manual_from_now_on(self: Any) -> Any:
    self.automatic_optimization = False
    return Classifier.configure_optimizers(self)


def _two(self: Any) -> Any:
    return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def _none(self: Any, batch: Any, batch_idx: int) -> Any:
    return None


def _of_parts(self: Any) -> None:
    Classifier.__init__(self)
    self.part = Classifier()


def _of_samples(self: Any, batch: Any, batch_idx: int) -> Any:
    return cross_entropy(self(batch[0]), batch[1], reduction="none")


def _asks(what: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        what(self, batch_idx)
        return cross_entropy(self(batch[0]), batch[1])

    return step


def _by_group(optimizer: Any) -> Any:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(()))], "lr": 1.0})
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])


def _one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)


def _exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def _side_by_side(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
    return optimizer, _exponential(optimizer)


def _misspelt(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
    return {"optimizer": optimizer, "lr_schedulers": _exponential(optimizer)}


def _from_nothing(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.0, 0.1, cycle_momentum=False)


def _of_another(self: Any) -> Any:
    optimizer, other = _two(self)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(other, 1)]


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=4)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"__init__": _manual}, r"`automatic_optimization = False`: .* `evenstep.Engine`"),
        ({"configure_optimizers": _two}, "gives 2 optimizers"),
        ({"configure_optimizers": lambda self: None}, "must give an optimizer, but gives None"),
        (
            {"configure_optimizers": lambda self: _wrapped(Classifier.configure_optimizers(self))},
            "gives a LightningOptimizer, .* its `.optimizer`, and build the scheduler of that",
        ),
        (
            {"on_train_epoch_end": lambda self: None},
            r"overrides `on_train_epoch_end`, .*without=\['on_train_epoch_end'\]",
        ),
        ({"optimizer_step": lambda self, *_: None}, "overrides `optimizer_step`"),
        (
            {"__init__": _of_parts, "training_step": _asks(lambda self, index: self.part.log("n", 1.0))},
            r"or a LightningModule that is a part of it does, .* let its own `training_step`",
        ),
        ({"training_step": _none}, "must give the loss, but gave None"),
        ({"training_step": _of_samples}, r"one number, but gave a tensor of shape \[4\]; give its mean"),
        ({"training_step": _asks(lambda self, index: index % 10)}, "Own.training_step` asks the number of its batch"),
        (
            {"training_step": _asks(lambda self, index: self.current_epoch)},
            "asks `current_epoch` of Lightning's trainer",
        ),
        ({"training_step": _asks(lambda self, index: self.optimizers())}, "asks `strategy` of Lightning's trainer"),
        (
            {"training_step": _asks(lambda self, index: setattr(self.trainer, "should_stop", True))},
            r"sets `should_stop` of Lightning's trainer, .* `self.trainer.request_stop\(…\)`",
        ),
        ({"training_step": _asks(lambda self, index: self.log("n", 1.0, reduce_fx="sum"))}, "with `reduce_fx='sum'`"),
        ({"training_step": _asks(lambda self, index: self.log("n", "x"))}, "must be a number, but is 'x'"),
        ({"training_step": _asks(lambda self, index: self.log("n", 1.0, True))}, "with arguments by position"),
        ({"configure_optimizers": _rates(_by_group)}, "schedules of their own; say them as `lr_schedule=PerGroup"),
        ({"configure_optimizers": _rates(_one_cycle, interval="step")}, "also moves `betas`"),
        ({"configure_optimizers": _rates(_plateau)}, "patience_evaluations=5"),
        ({"configure_optimizers": _rates(lambda _: 3)}, "gives 3 as its scheduler"),
        (
            {"setup": lambda self, stage: setattr(self, "automatic_optimization", False)},
            "`automatic_optimization = Fal",
        ),
        ({"configure_optimizers": _manual_from_now_on}, "`automatic_optimization = False`: .* `evenstep.Engine`"),
        ({"configure_optimizers": _rates(_exponential, intervall="step")}, "gives `intervall`, .* mean `interval`"),
        ({"configure_optimizers": _misspelt}, "gives `lr_schedulers`, .* mean `lr_scheduler`"),
        ({"configure_optimizers": _side_by_side}, r"return `\[optimizer\], \[scheduler\]`"),
        (
            {"configure_optimizers": _rates(_exponential, interval="step", frequency=2)},
            r"StepLR\(optimizer, step_size=2\)",
        ),
        ({"configure_optimizers": _rates(_exponential, frequency=0)}, "must be at least 1, but is 0"),
        ({"configure_optimizers": _rates(_exponential, frequency=None)}, "must be a whole number, but is None"),
        ({"configure_optimizers": _rates(_from_nothing, interval="step")}, "a rate to a group that begins at 0"),
        ({"training_step": lambda self, batch, batch_idx, dataloader_idx: None}, "such as `dataloader_idx=0`"),
        ({"training_step": lambda self, dataloader_iter: None}, r"let it take a batch, `training_step\(self, batch, "),
        ({"training_step": lightning.LightningModule.training_step}, "`Own` has no `training_step`, .* write one"),
        ({"training_step": _asks(lambda self, index: 10 - index)}, "Own.training_step` asks the number of its batch"),
        ({"training_step": _asks(lambda self, index: {index: 1})}, "Own.training_step` asks the number of its batch"),
        ({"training_step": _asks(lambda self, index: self.log("n", index))}, "asks the number of its batch"),
        ({"training_step": _asks(lambda self, index: index & 1)}, "Own.training_step` asks the number of its batch"),
        ({"training_step": _asks(lambda self, index: torch.tensor(index))}, "asks the number of its batch"),
        ({"training_step": _asks(lambda self, index: numpy.array(index))}, "asks the number of its batch"),
        (
            {"training_step": _asks(lambda self, index: self.log("n", 1.0, batch_size="4"))},
            "with `batch_size='4'`, which must be the number of samples",
        ),
        ({"training_step": _asks(lambda self, index: self.log("n", 1.0, on_stp=True))}, "did you mean `on_step`"),
        ({"training_step": _asks(lambda self, index: self.log("loss", 100.0))}, "another number .* under another name"),
        ({"training_step": _asks(lambda self, index: self.log("lr", 1.0))}, "Own gives a metric called `lr`"),
        ({"validation_epoch_end": lambda self, outputs: None}, "overrides `validation_epoch_end`, which this engine"),
        ({"on_epoch_end": lambda self: None}, r"overrides `on_epoch_end`, .*without=\['on_epoch_end'\]"),
        ({"on_hpc_save": lambda self, checkpoint: None}, "overrides `on_hpc_save`, which this engine does not call"),
        ({"teardown": lambda self, stage: None}, "overrides `teardown`, which this engine does not call"),
        ({"get_extra_state": lambda self: 1}, r"overrides `get_extra_state`, .* do it in an `evenstep.Hook`, and say"),
        (
            {"on_after_batch_transfer": lambda self, batch, index: batch},
            r"let its steps begin with `batch = self.on_after_batch_transfer\(batch, …\)`, and say `without=",
        ),
        (
            {"training_step": _asks(lambda self, index: self.log("n", torchmetrics.MeanMetric()))},
            "is a MeanMetric; log what its call gives where a mean of that is meant, and give others to `Task.metrics`",
        ),
        ({"training_step": _asks(lambda self, index: self.log("n", torch.ones(2)))}, r"shape \[2\]; log its mean"),
        ({"configure_optimizers": _of_another}, "a StepLR of another optimizer than the one beside it"),
        ({"configure_optimizers": _rates(_exponential, reduce_on_plateau=True)}, "is stepped with a metric"),
    ],
)
def test_what_can_not_be_said_exactly_is_refused_by_name(members: dict[str, Any], said: str) -> None:
    with pytest.raises(EvenstepError, match=said):
        _trainer(_with(**members)).train()


def test_a_scheduler_that_follows_evaluations_is_what_its_refusal_says() -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "max", 0.5, patience=0, cooldown=1, min_lr=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "accuracy"}

    theirs = _with(configure_optimizers=configure_optimizers)
    with pytest.raises(ArgumentError, match="return the optimizer alone") as refused:
        _trainer(theirs)
    (written,) = re.findall(r"lr_schedule=(Plateau\(.*?\))`", str(refused.value))
    optimizer = _by_lightning(theirs, epochs=6).optimizers[0]
    schedule = eval(written, {"Plateau": evenstep.Plateau})
    _trainer(
        _with(configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=1.0)),
        epochs=6,
        lr_schedule=schedule,
        evaluations=DataLoader(TensorDataset(INPUTS, CLASSES), 48),
        hooks=evenstep.Evaluate(every_epochs=1),
        train=evenstep.Training(clip_norm=0.5),
    ).train()
    assert optimizer.param_groups[0]["lr"] == schedule.multiplier < 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"count": 16}, "`count` must be a function that gives the number of units of a batch, but is 16"),
        ({"updates": "9"}, "`updates` must be a whole number, but is '9'"),
        ({"without": None}, "`without` must be a list of names, but is None"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        _trainer(Classifier(), **asked)


def test_what_is_no_module_yet_or_any_more_is_refused_with_what_to_give() -> None:
    with pytest.raises(ArgumentError, match=r"is the class Classifier itself; write `parts\(Classifier\(…\)\)`"):
        _trainer(Classifier)
    with pytest.raises(ArgumentError, match=r"is a ModuleDict; give it as it was before `torch.compile`"):
        _trainer(nn.ModuleDict({"_orig_mod": Classifier()}))  # where `torch.compile` puts it


def _by_name(self: Any, batch: Any, *, batch_idx: int) -> Any:
    return Classifier.training_step(self, batch, batch_idx)


def _by_any(self: Any, *given: Any) -> Any:
    batch, batch_idx = given
    return Classifier.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("step", [_by_name, _by_any, wraps(Classifier.training_step)(_by_any)])
def test_a_step_gets_the_number_of_its_batch_however_it_takes_it(step: Any) -> None:
    plain, module = Classifier(), _with(training_step=step)
    for each in (plain, module):
        _trainer(each, epochs=1).train()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("length", [{"epochs": EPOCHS}, {"updates": 9}])
def test_a_scheduler_may_be_made_for_no_more_epochs_than_the_run_has(length: dict[str, int]) -> None:
    rates = {0: 1.0, 1: 0.5, 2: 0.1, 3: 0.0}  # Lightning makes a step after the last epoch
    members = {"configure_optimizers": _rates(lambda one: torch.optim.lr_scheduler.LambdaLR(one, rates.__getitem__))}
    ours, theirs = _with(**members), _with(**members)
    data = evenstep.MapData(
        TensorDataset(INPUTS, CLASSES), global_batch_size=GLOBAL, micro_batch_size=MICRO, shuffle=False
    )
    clipped = evenstep.Training(clip_norm=0.5)
    evenstep.Trainer(**evenstep.lightning.parts(ours), data=data, device="cpu", train=clipped, **length).train()
    _by_lightning(theirs)
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), value)


def test_a_group_whose_rate_is_0_keeps_it() -> None:
    def configure_optimizers(self: Any) -> Any:
        first, last = self.net[0].parameters(), self.net[2].parameters()
        optimizer = torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": last, "lr": 0.0}])
        return [optimizer], [_exponential(optimizer)]

    module = _with(configure_optimizers=configure_optimizers)
    before = [each.detach().clone() for each in module.parameters()]
    _trainer(module).train()
    moved = [not torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True)]
    assert moved == [True, True, False, False]


def test_an_evaluation_may_log_its_loss_as_a_plain_number() -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]).item())

    data = DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    expected = _trainer(Classifier(), evaluations=data).train().metrics["valid/loss"]
    module = _with(validation_step=validation_step)
    assert _trainer(module, evaluations=data).train().metrics["valid/loss"] == pytest.approx(expected, rel=1e-6)


def test_a_hook_that_the_user_can_do_without_is_named_and_others_are_not_taken_for_it() -> None:
    module = _with(on_train_epoch_end=lambda self: None)
    _trainer(module, without=["on_train_epoch_end"])
    with pytest.raises(ArgumentError, match="`without` names `on_fit_end`, but `Classifier` overrides no hook"):
        _trainer(Classifier(), without=["on_fit_end"])
    with pytest.raises(ArgumentError, match=r"write `without=\['on_train_epoch_end'\]`"):
        _trainer(module, without="on_train_epoch_end")


def test_a_hook_that_was_put_on_the_object_is_found_as_well() -> None:
    module = Classifier()
    module.on_train_epoch_end = lambda: None
    with pytest.raises(ArgumentError, match="`Classifier` overrides `on_train_epoch_end`"):
        _trainer(module)
    module.on_train_epoch_end = None  # as it is said that there is none
    _trainer(module)


def test_a_module_without_a_validation_step_is_evaluated_by_its_training_step() -> None:
    module, data = Classifier(), DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    module.validation_step = None
    expected = _trainer(Classifier(), evaluations=data).train().metrics["valid/loss"]
    assert _trainer(module, evaluations=data).train().metrics["valid/loss"] == expected


def test_what_is_logged_twice_in_a_step_is_averaged_as_lightning_does() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        for value in (numpy.float32(0), 1, 5.0):
            self.log("each", value, on_step=False, on_epoch=True)
        return cross_entropy(self(batch[0]), batch[1])

    theirs, ours = (_with(training_step=step) for _ in range(2))
    assert _trainer(ours).train().metrics["train/each"] == 2.0
    assert _by_lightning(theirs).callback_metrics["each"] == 2.0


def test_a_number_of_a_small_format_is_logged_as_it_is() -> None:
    numbers = {"float16": 30000.0, "bfloat16": 0.69921875, "uint8": 100.0, "int8": 100.0, "bool": 1.0}

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        for name, number in numbers.items():
            self.log(name, torch.tensor(number, dtype=getattr(torch, name)))
        return cross_entropy(self(batch[0]), batch[1])

    metrics = _trainer(_with(training_step=step), micro=3, epochs=1).train().metrics
    assert {name: metrics[f"train/{name}"] for name in numbers} == numbers


def test_a_loss_of_an_evaluation_that_is_logged_in_parts_is_their_mean() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        for half, size in ((slice(0, 16), 16), (slice(16, 48), 32)):
            self.log("val_loss", cross_entropy(self(batch[0][half]), batch[1][half]), batch_size=size)

    data = DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    (one, other) = (
        _trainer(made, evaluations=data).train().metrics["valid/loss"]
        for made in (Classifier(), _with(validation_step=step))
    )
    assert other == pytest.approx(one, rel=1e-6)


def test_a_validation_loss_that_is_a_sum_is_found_in_the_first_evaluation() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1], reduction="sum"))

    data = DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    with pytest.raises(TaskError, match=r"in evaluations: the loss of .* `Own.loss` gives as a mean what is a sum"):
        _trainer(_with(validation_step=step), evaluations=data).train()


def test_a_sum_that_is_logged_in_the_place_of_a_mean_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        self.log_dict({"right": (output.argmax(-1) == batch[1]).sum(), "share": (output > 0).float().mean()})
        return cross_entropy(output, batch[1])

    data = DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    _trainer(_with(validation_step=step), evaluations=data).train()
    assert "gives the metric `right` as a mean, but it is a sum" in caplog.text and "share" not in caplog.text


def test_a_constant_batch_size_is_said_with_what_a_module_can_do(caplog: pytest.LogCaptureFixture) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, batch_size=4)
        return loss

    _trainer(_with(training_step=step)).train()
    assert "`train_loss` with weight 4 for a whole batch and for its halves" in caplog.text
    assert "leave `batch_size=` out" in caplog.text


def test_a_step_that_asks_the_number_of_its_set_is_refused_and_one_that_takes_it_is_not() -> None:
    def logs(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return Classifier.validation_step(self, batch, batch_idx)

    def asks(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log(f"loss_{dataloader_idx}", cross_entropy(self(batch[0]), batch[1]))

    sets = dict.fromkeys(("a", "b"), DataLoader(TensorDataset(INPUTS, CLASSES), 48))
    metrics = _trainer(_with(validation_step=logs), evaluations=sets).train().metrics
    assert metrics["a/val_loss"] == metrics["b/val_loss"]
    with pytest.raises(TaskError, match=r"`Own.validation_step` asks the number of its set .* under the same names"):
        _trainer(_with(validation_step=asks), evaluations=sets).train()


def test_lightning_goes_on_with_a_module_that_was_trained_here() -> None:
    module, data = Classifier(), DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    metrics = _trainer(module, evaluations=data).train().metrics
    assert module.training
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        (found,) = trainer.validate(module, data, verbose=False)
    assert found["val_loss"] == pytest.approx(metrics["valid/val_loss"], rel=1e-6)


class Frozen(Classifier):
    """One that keeps some of its layers as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(6), *self.net)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.net[0].eval()
        return self


@pytest.mark.parametrize("mode", [True, False])
def test_the_modules_own_way_into_training_mode_is_taken(mode: bool) -> None:
    module = Frozen().train(mode)
    _trainer(module, evaluations=DataLoader(TensorDataset(INPUTS, CLASSES), 48)).train()
    assert [module.training, module.net[0].training, module.net[1].training] == [True, False, True]
    assert not module.net[0].running_mean.any()


def test_the_number_of_updates_is_given_where_a_module_asks_for_it() -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    with pytest.raises(ArgumentError, match=r"say how many it will be, `parts\(module, updates=…\)`"):
        _trainer(_with(configure_optimizers=configure_optimizers))
    _trainer(_with(configure_optimizers=configure_optimizers), updates=9).train()
    with pytest.raises(ArgumentError, match=r"has 7 updates .* but the run has 9; say `updates=9`"):
        _trainer(_with(configure_optimizers=configure_optimizers), updates=7)


def test_an_evaluation_without_a_loss_asks_for_one_and_predictions_are_refused() -> None:
    data = DataLoader(TensorDataset(INPUTS, CLASSES), 48)
    module = _with(validation_step=lambda self, batch, batch_idx: None)
    with pytest.raises(TaskError, match="returns no loss, and logs none under a name that ends in `loss`; return the"):
        _trainer(module, evaluations=data).train()
    module = _with(validation_step=lambda self, batch, batch_idx: self.log("val_loss", 1.0, batch_size=5))
    with pytest.raises(TaskError, match=r"logs `val_loss` as a mean over `batch_size=5`, but a batch of 48 .*`parts\("):
        _trainer(module, evaluations=data).train()
    module = _with(validation_step=lambda self, batch, batch_idx: self.log_dict({"a_loss": 1.0, "b_loss": 2.0}))
    with pytest.raises(TaskError, match="returns no loss, and of what it logs `a_loss` and `b_loss` may be it; return"):
        _trainer(module, evaluations=data).train()
    module = _with(validation_step=lambda self, batch, batch_idx: self.log("val_loss", 1.0, batch_size=48))
    assert _trainer(module, evaluations=data).train().metrics["valid/loss"] == 1.0
    with pytest.raises(TaskError, match="predictions of `Classifier` are those of the module itself"):
        _trainer(Classifier()).predict(data)
