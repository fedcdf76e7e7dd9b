"""What ranks run to show a cross-entropy in chunks where they share the head's matrix."""

from typing import Any

import torch
from launched import group_of_ranks
from torch import Tensor, nn

from evenstep import MapData, Task, Trainer, chunked_cross_entropy
from evenstep.errors import EvenstepError
from evenstep.parallel import Fsdp


class Scores(nn.Module):
    """Gives the loss, or what it would be made of."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.embedding = nn.Embedding(12, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 12, bias=False)

    def forward(self, numbers: Tensor, labels: Tensor) -> Any:
        x = self.embedding(numbers)
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.inside:
            return chunked_cross_entropy(x, self.head.weight, labels, chunk_tokens=5)
        return x, self.head.weight


class NextNumber(Task):
    def inputs(self, batch: Any) -> Any:
        return {"numbers": batch[0], "labels": batch[1]}

    def weight(self, batch: Any) -> Any:
        return (batch[1] != -100).sum()

    def loss(self, output: Any, batch: Any) -> Tensor:
        return output if isinstance(output, Tensor) else chunked_cross_entropy(*output, batch[1], chunk_tokens=5)


def trained(strategy: Any, *, inside: bool) -> dict[str, list[Any]]:
    """The parameters after four updates."""
    torch.manual_seed(0)
    model = Scores(inside=inside)
    numbers = torch.randint(12, (20, 7), generator=torch.Generator().manual_seed(1))
    labels = numbers.roll(-1, 1).masked_fill(numbers % 5 == 0, -100)
    trainer = Trainer(
        model=model,
        task=NextNumber(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data=MapData(torch.utils.data.TensorDataset(numbers, labels), global_batch_size=8, micro_batch_size=2),
        updates=4,
        device="cpu",
        strategy=strategy,
    )
    trainer.train()
    return {name: value.tolist() for name, value in trainer.state_dict()["model"].items()}


def sharing() -> tuple[dict[str, list[Any]], str]:
    """The parameters with a loss made in the forward, and what is said of one made outside of it."""
    strategy = Fsdp(group_of_ranks())
    state = trained(strategy, inside=True)
    try:
        trained(strategy, inside=False)
    except EvenstepError as error:
        return state, str(error)
    return state, ""
