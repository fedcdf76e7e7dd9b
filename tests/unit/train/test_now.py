"""Values that a task may ask for in its methods: the update, whether it trains, and the average of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Memory, Trainer, Training
from evenstep.parallel import Ddp, Zero1
from kit import Squares, data, flat, net, noisy, points, stacked
from kit import trainer_of as trainer_of_kit
from same import assert_same

DECAY = 0.8


class MeanTeacher(Squares):
    """The distance to the label, and to the output of the average."""

    uses_average = True

    def loss(self, output: Any, batch: Any) -> Tensor:
        taught = self.now.teacher(self.inputs(batch))
        assert not taught.requires_grad
        return super().loss(output, batch) + ((output - taught) ** 2).sum()


class Ignores(MeanTeacher):
    """Asks the average, and makes nothing of it."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.uses_average:
            self.now.teacher(self.inputs(batch))
        return Squares.loss(self, output, batch)


def trainer_of(model: nn.Module | None = None, *hooks: Any, micro: int = 4, **more: Any) -> Trainer:
    given: dict[str, Any] = {
        "task": MeanTeacher(),
        "train": Training(ema=Ema(decay=DECAY, decay_warmup=True)),
        "data": data(12, size=6, micro=micro, shuffle=False),
    }
    return trainer_of_kit(model or net(), *hooks, **given | more)


def plain_loop() -> Tensor:
    """The same in a few lines of torch."""
    model, average = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for update in range(1, 7):
        x, y = stacked(points(12)[:6] if update % 2 else points(12)[6:])
        output = model(x)
        optimizer.zero_grad()
        losses = ((output.squeeze(-1) - y) ** 2).sum() + ((output - average(x).detach()) ** 2).sum()
        (losses / 6).backward()
        optimizer.step()
        decay = min(DECAY, (1 + update) / (10 + update))
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.copy_(decay * old + (1 - decay) * new)
    return flat(model)


@pytest.mark.parametrize("micro", [1, 4, 6])
def test_a_mean_teacher_trains_as_a_plain_loop_does_at_every_cut(micro: int) -> None:
    trainer = trainer_of(micro=micro)
    trainer.train()
    torch.testing.assert_close(flat(trainer.model), plain_loop(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", [Ddp, Zero1])
def test_two_ranks_have_the_bits_of_one(strategy: Any, on_ranks: Any) -> None:
    def act(group: Any) -> Tensor:
        trainer = trainer_of(micro=1, strategy=strategy(group))
        trainer.train()
        return flat(trainer.model)

    alone = on_ranks(1, act)[0]
    assert all(torch.equal(alone, found) for found in on_ranks(2, act))


def test_the_teacher_leaves_no_trace_where_nothing_is_made_of_it() -> None:
    class Without(Ignores):
        uses_average = False

    asking, without = noisy(), noisy()
    for model, task in ((asking, Ignores()), (without, Without())):
        trainer_of(model, task=task, train=Training(ema=Ema(decay=DECAY), memory=Memory(checkpoint="*"))).train()
    assert_same(asking.state_dict(), without.state_dict())
    assert asking.training


def test_a_task_knows_the_update_and_whether_it_trains() -> None:
    seen: list[tuple[int, bool]] = []

    class Told(Squares):
        def loss(self, output: Any, batch: Any) -> Tensor:
            seen.append((self.now.update, self.now.is_training))
            return super().loss(output, batch)

    valid = {"valid": data(2, size=2, micro=2, shuffle=False)}
    trainer_of(task=Told(), train=Training(check_loss=False), updates=3, evaluations=valid).train()
    assert [update for update, trains in seen if trains] == [1, 1, 2, 2, 3, 3]
    assert (seen[0], seen[-1]) == ((0, False), (3, False))
