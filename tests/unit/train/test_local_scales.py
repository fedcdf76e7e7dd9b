"""Ranks that step alone, each with a loss scale of its own: beside a run by hand in float64; ranks as threads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, Failures, Hook, Local, Logging, MapData, Task, Trainer, Training
from evenstep.errors import CheckpointError, LostRankError, NonFiniteError
from evenstep.events import Incident
from evenstep.parallel import Ddp, Group
from evenstep.precision import Fp16Mixed, Precision
from evenstep.precision.loss_scale import LossScaled

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
RATE, EVERY, LARGEST = 0.05, 4, 65504.0
SCALE, GROWTH = 2.0**16, 3  # the first scale; it is doubled after so many updates


class Scaled64(LossScaled):
    """A loss scale in float64, where what float16 could not hold comes back as infinite."""

    name: ClassVar[str] = "scaled-64"
    instead = "32-true"


class Half(torch.autograd.Function):
    """The identity, whose gradient has the range of float16."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.where(grads[0].abs() > LARGEST, grads[0] * torch.inf, grads[0])


class Net(nn.Module):
    """A line; counts its forwards of training, and spoils the inputs of one rank's if a test asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        with torch.no_grad():
            self.line.weight.fill_(0.5)
            self.line.bias.fill_(0.25)
        self.forwards, self.spoils = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        y = self.line(x * torch.nan if self.spoils and self.training else x)
        return Half.apply(y) if y.dtype == torch.float64 else y


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def points(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """24 points; of each global batch of 8, the second half is further off, by powers of 2."""
    x = torch.linspace(-1, 1, 24, dtype=dtype)
    return [(one.unsqueeze(0), (3 * one.abs() - 1) * (16.0 if n % 8 >= 4 else 0.5)) for n, one in enumerate(x)]


class Listens(Hook):
    """Hears incidents, and has the inputs of rank 1 spoilt in one update."""

    def __init__(self, net: Net, spoilt: int = 0) -> None:
        self.net, self.spoilt = net, spoilt
        self.heard: list[Incident] = []

    def before_update(self, event: Any) -> None:
        self.net.spoils = event.update == self.spoilt and not self.trainer.is_first_rank

    def on_incident(self, incident: Incident) -> None:
        self.heard.append(incident)


def trainer(
    group: Group,
    precision: Precision | None = None,
    *,
    updates: int = 10,
    spoilt: int = 0,
    settings: dict[str, Any] | None = None,
    rate: float = RATE,
    **more: Any,
) -> tuple[Trainer, Listens]:
    net = Net()
    wide = precision is None or isinstance(precision, Scaled64)
    net.to(torch.float64 if wide else torch.float32)
    hears = Listens(net, spoilt)
    made = Trainer(
        model=net,
        task=Square(),
        optimizer=torch.optim.SGD(net.parameters(), lr=rate),
        data=MapData(
            points(torch.float64 if wide else torch.float32), global_batch_size=8, micro_batch_size=2, shuffle=False
        ),
        updates=updates,
        device="cpu",
        strategy=Local(Ddp(group), every_updates=EVERY, **(settings or {})),
        precision=precision or Scaled64(initial=SCALE, growth_updates=GROWTH),
        hooks=[hears],
        train=Training(check_loss=False),
        log=Logging(every_updates=3, writers=()),
        **more,
    )
    return made, hears


def by_hand(ranks: int, updates: int, *, together: int = 0) -> tuple[list[Tensor], list[tuple[float, int]], int]:
    """Parameters of each rank, its scale and the updates since that last changed, and how many tries overflowed."""
    data, held = points(), [torch.tensor([0.5, 0.25], dtype=torch.float64) for _ in range(ranks)]
    scales, overflows = [(SCALE, 0)] * ranks, 0
    for update in range(1, updates + 1):
        alone = update > together
        for rank in range(ranks):
            batch = data[8 * ((update - 1) % 3) :][:8]
            mine = batch[rank * 8 // ranks : (rank + 1) * 8 // ranks] if alone else batch
            x, y = torch.cat([one for one, _ in mine]), torch.stack([one for _, one in mine])
            back = 2 * (held[rank][0] * x + held[rank][1] - y) / len(mine)
            scale, clean = scales[rank]
            while float((scale * back).abs().max()) > LARGEST:
                scale, clean, overflows = scale / 2, 0, overflows + 1
            scales[rank] = (scale * 2, 0) if clean + 1 == GROWTH else (scale, clean + 1)
            held[rank] = held[rank] - RATE * torch.stack([(back * x).sum(), back.sum()])
        if alone and (update - together) % EVERY == 0:
            held = [torch.stack(held).mean(0) for _ in held]
    return held, scales, overflows


def held(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def scale_of(one: Trainer) -> tuple[float, int]:
    state: Any = one._loop.engine.precision.state
    return state["scale"], state["clean_updates"]


@pytest.mark.parametrize("together", [0, 5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_comes_to_the_loss_scale_of_its_own_gradients_and_no_step_is_lost(
    on_ranks: OnRanks, ranks: int, together: int
) -> None:
    def act(group: Group) -> Any:
        one, hears = trainer(group, settings={"synchronous_updates": together})
        one.train()
        own = [incident for incident in hears.heard if incident.rank in (group.rank, None)]
        return one.progress.update, held(one.model), scale_of(one), [incident.kind for incident in own]

    wanted, scales, overflows = by_hand(ranks, 10, together=together)
    found = on_ranks(ranks, act)
    for (update, parameters, scale, _), theirs, its in zip(found, wanted, scales, strict=True):
        assert update == 10 and scale == its
        assert (parameters - theirs).abs().max() < 1e-12
    assert sum(len(kinds) for _, _, _, kinds in found) == overflows
    assert {kind for _, _, _, kinds in found for kind in kinds} == {"overflow"}
    assert len({scale for scale, _ in scales}) > 1  # the ranks have come to different ones


def test_in_float16_a_scale_that_overflows_on_one_rank_changes_no_bit(on_ranks: OnRanks) -> None:
    """Scales are powers of 2: what is computed again at a lower one is what any scale without an overflow gives."""

    def act(group: Group) -> Any:
        ended = []
        for initial in (2.0**14, 2.0**5):
            one, hears = trainer(group, Fp16Mixed(initial=initial), updates=6, rate=2.0**-6)
            one.train()
            said = [incident.message for incident in hears.heard]
            metrics = {name: one.storage.history(f"train/{name}") for name in ("loss", "grad_norm")}
            ended.append((held(one.model), scale_of(one)[0], said, one.model.forwards, metrics))
        return ended

    found = on_ranks(2, act)
    for high, low in found:
        assert torch.equal(high[0], low[0]) and high[4] == low[4]
        assert low[1:3] == (2.0**5, []) and low[3] == 6 * 2
    first, second = found[0][0], found[1][0]
    assert first[1] == 2.0**14 and first[3] == 6 * 2  # the first rank has computed nothing twice
    assert second[1] < 2.0**14 and second[2][0].startswith("on rank 1, which steps alone: update 1 ")
    assert "its gradient overflowed at a loss scale of 16384" in second[2][0]
    assert first[2] == second[2]  # the first rank hears of it


def test_a_scale_of_its_own_is_saved_for_each_rank_and_restored_exactly(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Left in the midst of a period; the window of updates without an overflow goes on as well."""

    def act(group: Group) -> Any:
        straight, _ = trainer(group)
        straight.train()
        kept = {"folder": tmp_path / "run", "checkpoint": Checkpointing(asynchronous=False)}
        first, _ = trainer(group, updates=6, **kept)
        first.train()
        again, _ = trainer(group, **kept)
        again.resume()
        left, found = scale_of(first), scale_of(again)
        again.train()
        ends = [(one.state_dict(), held(one.model), scale_of(one)) for one in (straight, again)]
        return left, found, ends

    wanted, scales, _ = by_hand(2, 10)
    ranks = on_ranks(2, act)
    assert [left for left, _, _ in ranks] == by_hand(2, 6)[1] == [found for _, found, _ in ranks]
    for rank, (_, _, ends) in enumerate(ranks):
        (whole, parameters, scale), (again, same, other) = ends
        assert torch.equal(parameters, same) and scale == other == scales[rank]
        assert (parameters - wanted[rank]).abs().max() < 1e-12
        theirs = [whole["local"]["own"][str(one)]["precision"]["scale"] for one in range(2)]
        assert theirs == [one for one, _ in scales] and whole["precision"]["scale"] == theirs[0]
        assert again["local"]["own"]["1"]["precision"] == whole["local"]["own"]["1"]["precision"]


def test_ranks_that_begin_at_what_they_shared_begin_with_the_first_ranks_scale(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    def begin(group: Group) -> Any:
        kept = {"folder": tmp_path / "run", "checkpoint": Checkpointing(asynchronous=False)}
        one, _ = trainer(group, updates=6, **kept)
        one.train()
        return scale_of(one)

    first, second = on_ranks(2, begin)
    assert first != second

    def go_on(group: Group) -> Any:
        one, _ = trainer(group)
        one.resume(tmp_path / "run", reset="optimizer")
        return scale_of(one)

    assert on_ranks(4, go_on) == [first] * 4


def test_a_scale_at_its_floor_on_one_rank_stops_all_by_name(on_ranks: OnRanks) -> None:
    fits = by_hand(2, 1)[1][1][0]  # on the second rank; the first has none that is too large

    def act(group: Group) -> Any:
        one, _ = trainer(group, Scaled64(initial=fits * 3.9, floor=fits * 0.98))
        try:
            one.train()
        except (NonFiniteError, LostRankError) as error:
            if group.rank == 1:
                group.abort(group.abort_reason() or str(error))  # what the processes' own groups do by themselves
            return f"{type(error).__name__}: {error}", one.progress.update, scale_of(one)[0]
        return "nothing", 0, 0

    first, second = on_ranks(2, act)
    assert second[0].startswith("NonFiniteError") and "below the floor of" in second[0]
    assert second[1:] == (0, fits * 3.9)  # as before the update
    assert first[0].startswith("LostRankError") and "rank 1 failed" in first[0]


def test_a_bad_batch_on_one_rank_is_no_overflow_and_leaves_its_scale_as_it_was(on_ranks: OnRanks) -> None:
    """It would double in the third update: neither scale nor window know of one that was left out."""

    def act(group: Group) -> Any:
        precision = Scaled64(initial=8.0, growth_updates=GROWTH)
        one, hears = trainer(group, precision, updates=3, spoilt=3, failures=Failures(non_finite="skip"))
        one.train()
        return scale_of(one), [(incident.kind, incident.rank) for incident in hears.heard]

    first, second = on_ranks(2, act)
    assert first[0] == (16.0, 0) and second[0] == (8.0, 2)
    assert first[1] == second[1] == [("non_finite", 1)]


def test_a_rank_without_work_has_tried_nothing(on_ranks: OnRanks) -> None:
    """Of 8 samples in micro-batches of 2, four of eight ranks have none."""

    def act(group: Group) -> Any:
        one, _ = trainer(group, Scaled64(initial=8.0, growth_updates=100), updates=2)
        one.train()
        return scale_of(one)

    assert sorted(on_ranks(8, act)) == [(8.0, 0)] * 4 + [(8.0, 2)] * 4


def test_ranks_that_have_stepped_alone_are_not_put_together_again(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Their parameters, states and scales differ, which one gradient of all can't go on from."""

    def act(group: Group) -> str:
        kept = {"folder": tmp_path / "run", "checkpoint": Checkpointing(asynchronous=False)}
        trainer(group, updates=6, **kept)[0].train()
        later, _ = trainer(group, settings={"synchronous_updates": 8})
        with pytest.raises(CheckpointError) as caught:
            later.resume(tmp_path / "run", new_settings=True)
        advised = [({"synchronous_updates": 6}, ()), ({"synchronous_updates": 8}, "optimizer")]
        for settings, reset in advised:
            one, _ = trainer(group, settings=settings)
            one.resume(tmp_path / "run", new_settings=True, reset=reset)
            one.train()
        return str(caught.value)

    said = on_ranks(2, act)
    assert all("let `synchronous_updates` be at most 6, or begin at what they share" in one for one in said)
