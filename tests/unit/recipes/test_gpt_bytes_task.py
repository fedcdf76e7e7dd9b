from collections.abc import Callable
from types import ModuleType

import pytest
import torch


def test_the_loss_is_summed_over_bytes_and_measured_in_bits_too(recipe_file: Callable[[str], ModuleType]):
    task = recipe_file("gpt_bytes/task.py").NextByte()
    logits = torch.zeros(2, 3, 256)
    logits[0, 0, 65] = 9.0
    batch = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[65, 1, 1], [1, 1, 1]])
    loss = task.loss(logits, batch)

    bits = 5 * 8 - (torch.tensor(9.0).exp() / (torch.tensor(9.0).exp() + 255)).log2().item()
    assert task.weight(batch) == 6
    assert loss.sum.item() == pytest.approx(bits * 0.6931471805599453, rel=1e-6)
    assert loss.metrics["bits_per_byte"][0].item() == pytest.approx(bits, rel=1e-6)
    assert loss.metrics["bits_per_byte"][1] == 6
    assert (loss.metrics["accuracy"][0].item(), loss.metrics["accuracy"][1]) == (1, 6)
