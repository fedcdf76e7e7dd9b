"""A LightningModule as it is: the adapter gives the same updates as Lightning where both are right, or refuses by name.

Lightning is in the extra `dev`.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.errors import ArgumentError
from evenstep.integrations.lightning import parts
from refused import refused

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
    given = parts(module, **asked)
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


def _as_lists(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
    return [[optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]]


SCHEDULERS: dict[str, Any] = {
    "none": Classifier.configure_optimizers,
    "a list of two lists": _as_lists,
    "every second epoch": _rates(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), frequency=2),
    "by update": _rates(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9), interval="step"),
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


@pytest.mark.parametrize("micro", [3, 16])
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
    evenstep.Trainer(**parts(cut), data=data, epochs=1, device="cpu").train()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


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


def _two(self: Any) -> Any:
    return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def _manual(self: Any) -> None:
    Classifier.__init__(self)
    self.automatic_optimization = False


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def _decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


REFUSED: dict[str, dict[str, Any]] = {
    "manual optimization": {"__init__": _manual},
    "two optimizers": {"configure_optimizers": _two},
    "a hook": {"on_train_epoch_end": lambda self: None},
    "a scheduler that follows a metric": {"configure_optimizers": _rates(_plateau)},
    "a scheduler that counts batches": {"configure_optimizers": _rates(_decay, interval="step", frequency=2)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_modules_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError):
        _trainer(_with(**REFUSED[name]))


class Measured(Classifier):
    """Logs objects of torchmetrics, updated by a call and by `update`."""

    def __init__(self) -> None:
        super().__init__()
        options = {"task": "multiclass", "num_classes": 3}
        self.acc = torchmetrics.Accuracy(**options)
        self.f1 = torchmetrics.F1Score(**options, average="macro")
        self.auroc = torchmetrics.AUROC(**options)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        self.acc(output, batch[1])
        self.f1.update(output, target=batch[1])
        self.auroc.update(output.softmax(-1), batch[1])
        self.log("val_acc", self.acc, on_epoch=True)
        self.log_dict({"val_f1": self.f1, "val_auroc": self.auroc})
        return cross_entropy(output, batch[1])


def test_logged_torchmetrics_have_the_values_of_lightning_on_any_number_of_ranks(on_ranks: Any) -> None:
    theirs = Measured()
    reference = _by_lightning(theirs).callback_metrics
    names = ("val_acc", "val_f1", "val_auroc")
    evaluations = DataLoader(TensorDataset(INPUTS, CLASSES), 20)
    clipped = {"train": evenstep.Training(clip_norm=0.5), "evaluations": evaluations}
    module = Measured()
    metrics = _trainer(module, **clipped).train().metrics
    assert {name: metrics[f"valid/{name}"] for name in names} == pytest.approx(
        {name: float(reference[name]) for name in names}, abs=1e-6
    )
    assert not module.auroc.preds  # states of a step are not kept
    modules = [Measured(), Measured()]  # not in the threads of ranks, which share torch's generator

    def act(group: Any) -> Any:
        return _trainer(modules[group.rank], strategy=evenstep.parallel.Ddp(group), **clipped).train().metrics

    for each in on_ranks(2, act):
        assert {name: each[f"valid/{name}"] for name in names} == pytest.approx(
            {name: metrics[f"valid/{name}"] for name in names}, rel=1e-6
        )


def test_number_of_updates_is_given_to_a_module_that_asks() -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    _trainer(_with(configure_optimizers=configure_optimizers), updates=9).train()
    with refused(ArgumentError, "updates"):
        _trainer(_with(configure_optimizers=configure_optimizers))
