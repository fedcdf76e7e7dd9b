"""Lightning's Trainer with a LightningModule.

Switched off: logger, checkpoints, progress bar, model summary, anomaly detection. The loss is recorded by `self.log`,
its documented way, and read by a callback once in 50 updates.
"""

import importlib
import logging
import warnings
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from harness.feed import Feed
from harness.work import CLIP_NORM, LOSS_EVERY_UPDATES, Work, mean_loss

lightning: Any = importlib.import_module("lightning.pytorch")


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module, work: Work) -> None:
        super().__init__()
        self.model = model
        self._work = work

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, classes = batch
        loss = mean_loss(self.model(inputs), classes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return self._work.optimizer(self.model)


class Losses(lightning.Callback):
    """Reads the loss that was logged last."""

    def __init__(self, every_batches: int) -> None:
        self.values: list[float] = []
        self._every_batches = every_batches

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._every_batches == 0:
            self.values.append(float(trainer.callback_metrics["loss"]))


def train(model: nn.Module, feed: Feed, work: Work, ranks: int = 1) -> list[float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses = Losses(LOSS_EVERY_UPDATES * work.num_microbatches)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if ranks == 1 else "ddp",
        use_distributed_sampler=False,
        max_epochs=1,
        accumulate_grad_batches=work.num_microbatches,
        gradient_clip_val=CLIP_NORM,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        detect_anomaly=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hints about data loaders and loggers
        trainer.fit(Module(model, work), feed)
    return losses.values
