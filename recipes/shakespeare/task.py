"""Predict the next character, and at the end show what the model writes."""

import torch
import torch.nn.functional as F
from corpus import characters
from model import CharGPT
from torch import Tensor

from evenstep import Hook, Loss, Task
from evenstep.events import TrainEvent


class NextCharacter(Task):
    """Summed cross-entropy of the next character, in nats; a batch is (inputs, targets), both `[batch, position]`."""

    unit = "tokens"  # a character is one

    def weight(self, batch: tuple[Tensor, Tensor]) -> int:
        """The number of characters that are predicted."""
        return batch[1].numel()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        """−Σ log p(target)."""
        return Loss(F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"))


class Sample(Hook):
    """At the end, print what the model writes; of a model in stages no rank has all, so there is no sample.

    All ranks run it, since those that hold shards of a model (`fsdp`) go forward together; the first prints.

    Args:
        prompt: what it goes on from.
        count: characters.
        temperature: below 1 plainer than the text, above 1 wilder.
        seed: of the draws.
    """

    def __init__(self, *, prompt: str = "\n", count: int = 400, temperature: float = 0.8, seed: int = 1) -> None:
        self.prompt = prompt
        self.count = count
        self.temperature = temperature
        self.seed = seed

    def after_train(self, event: TrainEvent) -> None:
        model = self.trainer.model
        if event.outcome == "failed" or not isinstance(model, CharGPT):
            return
        data = characters("valid", context=model.context, stride=model.context)
        generator = torch.Generator().manual_seed(self.seed)
        codes = model.generate(
            data.encode(self.prompt), count=self.count, temperature=self.temperature, generator=generator
        )
        if self.trainer.rank == 0:
            print(f"\na sample, after update {event.update}\n{self.prompt}{data.decode(codes)}\n", flush=True)
