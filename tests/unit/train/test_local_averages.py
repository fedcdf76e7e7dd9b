"""Ranks that step alone, with an average that follows what they share: beside float64 by hand; ranks as threads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import (
    Checkpointing,
    Ema,
    Engine,
    Failures,
    Hook,
    Local,
    Logging,
    MapData,
    Ordered,
    Strategy,
    Task,
    Trainer,
    Training,
)
from evenstep.parallel import Ddp, Group

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
RATE, EVERY, UPDATES = 0.05, 4, 10


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class Taught(Square):
    """Learns from the average as well."""

    uses_average = True

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch) + ((output - self.now.teacher(batch[0])) ** 2).sum()


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1).double()
        self.spoils = False
        with torch.no_grad():
            self.line.weight.fill_(0.5)
            self.line.bias.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x * torch.inf if self.spoils and self.training else x)


def points() -> list[tuple[Tensor, Tensor]]:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64)
    return [(one.unsqueeze(0), 3 * one.abs() - 1) for one in x]


def trainer(
    group: Group,
    ema: Ema | None,
    *,
    model: nn.Module | None = None,
    strategy: Strategy | None = None,
    task: Task | None = None,
    updates: int = UPDATES,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> Trainer:
    model = Line() if model is None else model
    return Trainer(
        model=model,
        task=task or Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data=MapData(points(), global_batch_size=8, micro_batch_size=2, shuffle=False),
        updates=updates,
        device="cpu",
        strategy=strategy or Local(Ddp(group), every_updates=EVERY, **(settings or {})),
        train=Training(check_loss=False, ema=ema),
        log=Logging(every_updates=3, writers=()),
        **more,
    )


def by_hand(
    ranks: int,
    decay: Callable[[int], float],
    *,
    together: int = 0,
    fragments: int = 1,
    late: int = 0,
    own: float = 0.0,
    left_out: tuple[tuple[int, int], ...] = (),
    taught: bool = False,
) -> tuple[Tensor, Tensor]:
    """What the ranks share and its average after all updates: e ← e + (1 - d_u)·(θ_u - e) in each."""
    data = points()
    held = [torch.tensor([0.5, 0.25], dtype=torch.float64) for _ in range(ranks)]
    shared, average, sent = held[0].clone(), held[0].clone(), dict[tuple[int, int], Tensor]()
    parts = [slice(0, 2)] if fragments == 1 else [slice(0, 1), slice(1, 2)]
    for update in range(1, UPDATES + 1):
        batch, alone = data[8 * ((update - 1) % 3) :][:8], update > together
        for rank in range(ranks):
            mine = batch[rank * 8 // ranks : (rank + 1) * 8 // ranks] if alone else batch
            x, y = torch.cat([one for one, _ in mine]), torch.stack([one for _, one in mine])
            miss = held[rank][0] * x + held[rank][1] - y
            if taught:
                miss = miss + held[rank][0] * x + held[rank][1] - (average[0] * x + average[1])
            if (rank, update) not in left_out:
                held[rank] = held[rank] - RATE * 2 * torch.stack([(miss * x).mean(), miss.mean()])
        if not alone:
            shared = held[0].clone()
        for number, part in enumerate(parts if alone else ()):
            if (update - together - EVERY * number // fragments) % EVERY == 0:
                sent[number, update + late] = torch.stack([one[part] for one in held]).mean(0)
            if (number, update) in sent:
                shared[part] = sent[number, update]
                for one in held:
                    one[part] = own * one[part] + (1 - own) * shared[part]
        average = average + (1 - decay(update)) * (shared - average)
    return shared, average


def held(values: Any) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in values])


def average_of(one: Trainer) -> Tensor:
    return held(one.state_dict()["ema"].values())


STREAMED = {"fragments": 2, "late": 1, "own": 0.5}


@pytest.mark.parametrize(
    ("options", "decay", "definition"),
    [
        ({"decay": 0.7}, lambda u: 0.7, {}),
        ({"decay": 0.7}, lambda u: 0.7, {"together": 5}),
        ({"decay": 0.7}, lambda u: 0.7, {"together": 3, **STREAMED}),
        ({"decay": 0.7, "start_update": 5}, lambda u: 0.7 if u > 5 else 0.0, STREAMED),
        ({"decay": 0.6, "every_updates": 2}, lambda u: 1.0 if u % 2 else 0.6, {}),
        ({"decay": 0.9, "decay_warmup": True}, lambda u: min(0.9, (1 + u) / (10 + u)), {"together": 1}),
    ],
)
def test_the_average_follows_what_ranks_share_in_every_update(
    on_ranks: OnRanks, options: dict[str, Any], decay: Callable[[int], float], definition: dict[str, Any]
) -> None:
    names = {"together": "synchronous_updates", "late": "overlap_updates", "own": "own_share", "fragments": "fragments"}

    def act(group: Group) -> Any:
        one = trainer(group, Ema(**options), settings={names[name]: value for name, value in definition.items()})
        one.train()
        state = one.state_dict()
        return held(state["model"].values()), held(state["ema"].values())

    shared, average = by_hand(2, decay, **definition)
    for found, its in on_ranks(2, act):
        assert (found - shared).abs().max() < 1e-12
        assert (its - average).abs().max() < 1e-12
    assert (shared - average).abs().max() > 1e-3


def test_shared_in_each_update_it_is_the_average_of_ddp(on_ranks: OnRanks) -> None:
    """Up to rounding, with plain SGD and equal weights; and to the bit where ranks step together all along."""

    def act(group: Group) -> Any:
        def averaged(strategy: Strategy) -> Tensor:
            model = Line()
            train = Training(ema=Ema(decay=0.7))
            one = Engine(
                model,
                Square(),
                torch.optim.SGD(model.parameters(), lr=RATE),
                strategy=strategy,
                train=train,
                device="cpu",
            )
            for update in range(5):
                x = torch.full((2, 1), 1.0 + update + group.rank, dtype=torch.float64)
                one.update((x, x[:, 0]))
            return held(one.state_dict()["ema"].values())

        ddp, alone = averaged(Ordered(group)), averaged(Local(Ordered(group), every_updates=1))
        together = averaged(Local(Ordered(group), every_updates=1, synchronous_updates=5))
        return float((ddp - alone).abs().max()), torch.equal(ddp, together)

    for difference, same in on_ranks(2, act):
        assert difference < 1e-14 and same


class Keeps(Hook):
    """Keeps the model that is shared after each update."""

    def __init__(self) -> None:
        self.shared: list[dict[str, Tensor]] = []

    def before_update(self, event: Any) -> None:
        model = self.trainer.state_dict()["model"]
        self.shared.append({name: one.clone() for name, one in model.items()})


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true-no-master"])
def test_buffers_and_formats_are_those_of_what_ranks_share(on_ranks: OnRanks, precision: str) -> None:
    """Statistics are averaged, counters copied; a master is averaged as the model would hold it."""

    def net() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).float()

    class Float(Square):
        def inputs(self, batch: Any) -> Any:
            return batch[0].float()

    def act(group: Group) -> Any:
        keeps = Keeps()
        one = trainer(group, Ema(decay=0.75), model=net(), task=Float(), hooks=[keeps], precision=precision)
        one.train()
        end = one.state_dict()
        formats = {name: value.dtype for name, value in one.model.state_dict().items()}
        return [*keeps.shared, end["model"]], end["ema"], formats

    found = on_ranks(2, act)
    states, average, formats = found[0]
    for name, dtype in formats.items():
        values = [state[name].to(dtype) for state in states]
        wanted = values[0].float() if dtype.is_floating_point else values[-1]
        for value in values[1:] if dtype.is_floating_point else ():
            wanted = wanted.lerp(value.float(), 0.25)
        assert average[name].dtype == wanted.dtype
        assert torch.allclose(average[name], wanted, rtol=1e-6, atol=1e-7), name
        assert torch.equal(average[name], found[1][1][name])
    assert average["1.num_batches_tracked"] == 8 * 4  # as of the last share, in update 8


def test_evaluated_is_the_average_or_what_ranks_share_or_both(on_ranks: OnRanks) -> None:
    def act(group: Group) -> Any:
        valid = MapData(points(), global_batch_size=8, shuffle=False)
        one = trainer(group, Ema(decay=0.7, evaluated="both"), evaluations=valid)
        one.train()
        before = held(one.model.parameters())
        return one.evaluate()["valid"], torch.equal(before, held(one.model.parameters()))

    shared, average = by_hand(2, lambda u: 0.7)
    losses = [sum(float((one[0] * x + one[1] - y) ** 2) for x, y in points()) / 24 for one in (average, shared)]
    for found, same in on_ranks(2, act):
        assert same  # each rank goes on with its own
        assert [found["loss"], found["parameters/loss"]] == pytest.approx(losses, abs=1e-12)


def test_a_task_learns_from_the_average_of_what_ranks_share(on_ranks: OnRanks) -> None:
    def act(group: Group) -> Tensor:
        one = trainer(group, Ema(decay=0.7), task=Taught())
        one.train()
        return average_of(one)

    _, average = by_hand(2, lambda u: 0.7, taught=True)
    assert all(float((found - average).abs().max()) < 1e-12 for found in on_ranks(2, act))


def test_a_rank_that_leaves_its_step_out_has_the_average_of_all(on_ranks: OnRanks) -> None:
    class Spoils(Hook):
        def before_update(self, event: Any) -> None:
            self.trainer.model.spoils = event.update == 4 and not self.trainer.is_first_rank

    def act(group: Group) -> Tensor:
        one = trainer(group, Ema(decay=0.7), hooks=[Spoils()], failures=Failures(non_finite="skip"))
        one.train()
        return average_of(one)

    _, average = by_hand(2, lambda u: 0.7, left_out=((1, 4),))
    assert all(float((found - average).abs().max()) < 1e-12 for found in on_ranks(2, act))


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_run_left_in_the_midst_of_a_period_goes_on_with_the_bits_of_its_average(
    on_ranks: OnRanks, tmp_path: Path, stop: int
) -> None:
    settings = {"synchronous_updates": 1, "fragments": 2, "overlap_updates": 2, "outer_momentum": 0.5}

    def act(group: Group) -> Any:
        straight = trainer(group, Ema(decay=0.7), settings=settings)
        straight.train()
        kept = {"folder": tmp_path / "run", "checkpoint": Checkpointing(asynchronous=False)}
        trainer(group, Ema(decay=0.7), settings=settings, updates=stop, **kept).train()
        again = trainer(group, Ema(decay=0.7), settings=settings, **kept)
        again.resume()
        again.train()
        return average_of(straight), average_of(again)

    (first, second), (same, _) = on_ranks(2, act)
    assert torch.equal(first, second) and torch.equal(first, same)


def test_an_average_that_is_new_in_the_midst_of_a_period_begins_as_a_copy_of_what_is_shared(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    def act(group: Group) -> Any:
        kept = {"folder": tmp_path / "run", "checkpoint": Checkpointing(asynchronous=False)}
        trainer(group, None, settings={"synchronous_updates": 1}, updates=7, **kept).train()
        again = trainer(group, Ema(decay=0.7), settings={"synchronous_updates": 1}, **kept)
        again.resume()
        state = again.state_dict()
        return held(state["model"].values()), held(state["ema"].values()), held(again.model.parameters())

    for shared, average, own in on_ranks(2, act):
        assert torch.equal(shared, average) and not torch.equal(shared, own)
