"""transformers' Trainer, with a loss of its own and ready-made batches.

Switched off: checkpoints, reports, progress bar and the printing of logs, the NaN filter of its logged loss, pinned
memory. The loss is summed and logged by the Trainer once in 50 updates.
"""

import importlib
import tempfile
from typing import Any

from torch import Tensor, nn

from harness.feed import Feed
from harness.work import CLIP_NORM, LEARNING_RATE, LOSS_EVERY_UPDATES, Work, mean_loss

transformers: Any = importlib.import_module("transformers")


class Trainer(transformers.Trainer):
    """Takes its batches from `feed`."""

    feed: Feed

    def get_train_dataloader(self) -> Feed:
        return self.feed

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **unused: Any
    ) -> Tensor:
        return mean_loss(model(inputs["inputs"]), inputs["labels"])


def train(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    feed.recast(lambda batch: {"inputs": batch[0], "labels": batch[1]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=feed.num_batches // work.num_microbatches,
            gradient_accumulation_steps=work.num_microbatches,
            max_grad_norm=CLIP_NORM,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            logging_steps=LOSS_EVERY_UPDATES,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, optimizers=(work.optimizer(model), None))
        trainer.feed = feed
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
