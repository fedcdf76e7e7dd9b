"""Runs whose ranks step alone: what fails on one rank, what is measured, evaluated and refused; ranks as threads."""

from collections.abc import Callable
from copy import deepcopy
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
    Skip,
    Task,
    Trainer,
    Training,
)
from evenstep.errors import ArgumentError, CheckpointError, LostRankError, NonFiniteError, ReplicaError
from evenstep.events import Incident
from evenstep.parallel import Ddp, Group

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
RATE, EVERY = 0.05, 4


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


class Net(nn.Module):
    """A line that does on one rank, in one forward of training, what a test asks for."""

    def __init__(self, act: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1).double()
        with torch.no_grad():
            self.line.weight.fill_(0.5)
            self.line.bias.fill_(0.25)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x if self.act is None or not self.training else self.act(x))


def points(count: int = 24) -> list[tuple[Tensor, Tensor]]:
    x = torch.linspace(-1, 1, count, dtype=torch.float64)
    return [(one.unsqueeze(0), 3 * one.abs() - 1) for one in x]


def trainer(group: Group, net: nn.Module | None = None, *, updates: int = 10, **more: Any) -> Trainer:
    net = Net() if net is None else net
    settings = {"every_updates": EVERY, **more.pop("settings", {})}
    return Trainer(
        model=net,
        task=more.pop("task", Square()),
        optimizer=torch.optim.SGD(net.parameters(), lr=RATE),
        data=MapData(points(), global_batch_size=8, micro_batch_size=2, shuffle=False),
        updates=updates,
        device="cpu",
        strategy=Local(Ddp(group), **settings),
        **{"train": Training(check_loss=False), "log": Logging(every_updates=3, writers=()), **more},
    )


def steps(ranks: int, updates: int, *, left_out: tuple[tuple[int, int], ...] = ()) -> tuple[list[Tensor], Tensor]:
    """Weight and bias of each rank by hand, and what they share; `left_out` are steps (rank, update) not made."""
    data = points()
    held = [torch.tensor([0.5, 0.25], dtype=torch.float64) for _ in range(ranks)]
    shared = held[0].clone()
    for update in range(1, updates + 1):
        batch = data[8 * ((update - 1) % 3) :][:8]
        for rank in range(ranks):
            mine = batch[rank * 8 // ranks : (rank + 1) * 8 // ranks]
            x, y = torch.cat([one for one, _ in mine]), torch.stack([one for _, one in mine])
            miss = held[rank][0] * x + held[rank][1] - y
            if (rank, update) not in left_out:
                held[rank] = held[rank] - RATE * 2 * torch.stack([(miss * x).mean(), miss.mean()])
        if update % EVERY == 0:
            shared = torch.stack(held).mean(0)
            held = [shared.clone() for _ in held]
    return held, shared


def held(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


class Listens(Hook):
    def __init__(self) -> None:
        self.heard: list[Incident] = []

    def on_incident(self, incident: Incident) -> None:
        self.heard.append(incident)


def in_update(model: Net, rank: int, update: int, act: Callable[[Tensor], Tensor]) -> Hook:
    """Lets `act` have the inputs of rank `rank`'s forwards in one update."""

    class At(Hook):
        def before_update(self, event: Any) -> None:
            model.act = act if event.update == update and self.trainer.is_first_rank == (rank == 0) else None

    return At()


def test_metrics_are_sums_over_all_ranks_in_every_update(on_ranks: OnRanks) -> None:
    def act(group: Group) -> list[float]:
        one = trainer(group, updates=6)
        one.train()
        return [record.value for record in one.storage.history("train/loss")]

    found, data = on_ranks(2, act), points()
    for update in range(1, 7):
        before, _ = steps(2, update - 1)
        batch = data[8 * ((update - 1) % 3) :][:8]
        misses = [(before[n // 4][0] * x + before[n // 4][1] - y).item() for n, (x, y) in enumerate(batch)]
        assert found[0][update - 1] == pytest.approx(sum(miss**2 for miss in misses) / 8, abs=1e-12)
    assert found[0] == found[1]


def test_evaluated_is_what_ranks_share_and_training_goes_on_with_the_ranks_own(on_ranks: OnRanks) -> None:
    def act(group: Group) -> Any:
        one = trainer(group, updates=6, evaluations=MapData(points(), global_batch_size=8, shuffle=False))
        one.train()
        return one.evaluate()["valid"]["loss"], held(one.model)

    own, shared = steps(2, 6)
    loss = sum(float((shared[0] * x + shared[1] - y) ** 2) for x, y in points()) / 24
    for rank, (found, parameters) in enumerate(on_ranks(2, act)):
        assert found == pytest.approx(loss, abs=1e-12)
        assert (parameters - own[rank]).abs().max() < 1e-12


def test_a_gradient_that_is_not_finite_on_one_rank_costs_that_rank_its_step(on_ranks: OnRanks) -> None:
    """All count the update, the rank says so, and its samples are in no metric."""

    def act(group: Group) -> Any:
        net, hears = Net(), Listens()
        hooks = [hears, in_update(net, 1, 3, lambda x: x * torch.inf)]
        one = trainer(group, net, hooks=hooks, failures=Failures(non_finite="skip"))
        one.train()
        return one.progress.update, held(net), hears.heard, one.storage.history("train/loss")[2].weight

    own, _ = steps(2, 10, left_out=((1, 3),))
    found = on_ranks(2, act)
    for rank, (update, parameters, heard, weight) in enumerate(found):
        assert update == 10 and weight == 4
        assert (parameters - own[rank]).abs().max() < 1e-12
        assert [one.kind for one in heard] == ["non_finite"]
        assert "on rank 1, which steps alone" in heard[0].message and "its loss is" in heard[0].message
        assert heard[0].rank == 1 and heard[0].message.endswith("leaves its own step out, and goes on.")


def test_a_rank_that_leaves_out_more_steps_in_a_row_than_the_policy_lets_it_stops_the_run(on_ranks: OnRanks) -> None:
    class Spoils(Hook):
        def before_update(self, event: Any) -> None:
            is_bad = event.update in (2, 4, 5, 6) and not self.trainer.is_first_rank
            self.trainer.model.act = (lambda x: x * torch.nan) if is_bad else None

    def act(group: Group) -> Any:
        one = trainer(group, hooks=[Spoils()], failures=Failures(non_finite=Skip(limit=2)))
        try:
            one.train()
        except (NonFiniteError, LostRankError) as error:
            if group.rank == 1:
                group.abort(group.abort_reason() or str(error))
            return type(error).__name__, one.progress.update

    assert on_ranks(2, act)[1] == ("NonFiniteError", 6)


def test_where_such_a_gradient_stops_the_run_that_rank_says_why_and_the_others_say_who(on_ranks: OnRanks) -> None:
    def act(group: Group) -> str:
        net = Net()
        one = trainer(group, net, hooks=[in_update(net, 1, 3, lambda x: x * torch.inf)])
        try:
            one.train()
        except (NonFiniteError, LostRankError) as error:
            if group.rank == 1:
                group.abort(group.abort_reason() or str(error))  # what the processes' own groups do by themselves
            return f"{type(error).__name__}: {error}"
        return "nothing"

    first, second = on_ranks(2, act)
    assert second.startswith("NonFiniteError") and "its loss is inf" in second
    assert first.startswith("LostRankError") and "rank 1 failed" in first


def test_an_engine_says_it_and_goes_on(on_ranks: OnRanks, caplog: pytest.LogCaptureFixture) -> None:
    def act(group: Group) -> Any:
        net = Net()
        one = Engine(
            net,
            Square(),
            torch.optim.SGD(net.parameters(), lr=RATE),
            strategy=Local(Ddp(group), every_updates=2),
            train=Training(check_loss=False),
            device="cpu",
        )
        outcomes = []
        for update in (1, 2, 3):
            bad = float("nan") if (update, group.rank) == (1, 0) else 1.0
            x = torch.full((2, 1), bad, dtype=torch.float64)
            none = update == 3 and group.rank == 0  # nothing to do is nothing to say
            outcomes.append(one.update(*([] if none else [(x, x[:, 0])])))
        return [type(outcome).__name__ for outcome in outcomes], one.progress.update, held(net)

    found = on_ranks(2, act)
    assert [(names, update) for names, update, _ in found] == [(["Committed"] * 3, 3)] * 2
    assert not torch.equal(found[0][2], found[1][2])
    assert caplog.text.count("on rank 0, which steps alone") == 1


def test_a_rank_without_memory_does_its_own_again_and_nobody_waits(on_ranks: OnRanks) -> None:
    def act(group: Group) -> Any:
        net, hears, tries = Net(), Listens(), []

        def fails(x: Tensor) -> Tensor:
            tries.append(len(x))
            if len(x) > 1:
                raise MemoryError
            return x

        one = trainer(group, net, hooks=[hears, in_update(net, 1, 3, fails)])
        one.train()
        return held(net), tries, [incident.kind for incident in hears.heard]

    own, _ = steps(2, 10)
    for rank, (parameters, tries, heard) in enumerate(on_ranks(2, act)):
        assert (parameters - own[rank]).abs().max() < 1e-12
        assert tries == ([2, 1, 1, 1, 1] if rank else [])
        assert heard == ["out_of_memory"]


def test_parameters_that_are_not_finite_stop_all_ranks_alike_and_nothing_is_shared(on_ranks: OnRanks) -> None:
    class Spoils(Hook):
        def after_update(self, event: Any) -> None:
            if event.update == 3 and not self.trainer.is_first_rank:
                with torch.no_grad():
                    self.trainer.model.line.bias.fill_(torch.inf)

    def act(group: Group) -> Any:
        one = trainer(group, hooks=[Spoils()], failures=Failures(non_finite="skip"))
        with pytest.raises(NonFiniteError) as caught:
            one.train()
        return str(caught.value), bool(held(one.model).isfinite().all())

    found = on_ranks(2, act)
    assert found[0][0] == found[1][0] and "after update 4 rank 1 holds parameters that are inf or NaN" in found[0][0]
    assert [finite for _, finite in found] == [True, False]


def test_what_a_task_remembers_of_its_rank_alone_is_told_in_the_next_share_once(on_ranks: OnRanks) -> None:
    class Remembers(Square):
        seen = 0.0

        def loss(self, output: Any, batch: Any) -> Tensor:
            self.seen += float(batch[1].sum())
            return super().loss(output, batch)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"]

    def act(group: Group) -> list[tuple[str, int]]:
        hears = Listens()
        trainer(group, hooks=[hears], task=Remembers()).train()
        return [(one.kind, one.update) for one in hears.heard if "Remembers['seen']" in one.message]

    assert on_ranks(2, act)[0] == [("dependence", EVERY)]


def test_of_buffers_that_forwards_move_it_is_said_that_ranks_take_them_when_they_synchronise(on_ranks: OnRanks) -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.sum()
            return super().forward(x)

    def act(group: Group) -> list[str]:
        hears = Listens()
        trainer(group, Counts(), hooks=[hears], updates=2).train()
        return [one.message for one in hears.heard if "the buffer `seen`" in one.message]

    (said,) = on_ranks(2, act)[0]
    assert "All ranks take them, when they synchronise, from the first rank" in said


@pytest.mark.parametrize(
    ("updates", "more", "said"),
    [
        (8, {}, ""),
        (10, {}, "last mean after update 8, so what they learn in the last 2 of the run's 10 updates"),
        (12, {"overlap_updates": 2}, "last mean after update 10, so what they learn in the last 2 of"),
        (3, {}, "no mean of what they learn after update 0 in the run's 3 updates"),
        (10, {"synchronous_updates": 8}, "no mean of what they learn after update 8 in the run's 10"),
        (8, {"synchronous_updates": 8}, ""),
    ],
)
def test_what_no_mean_takes_is_said_when_the_run_is_built(
    on_ranks: OnRanks, caplog: pytest.LogCaptureFixture, updates: int, more: dict[str, Any], said: str
) -> None:
    def act(group: Group) -> None:
        trainer(group, updates=updates, settings=more)

    on_ranks(2, act)
    assert caplog.text.count("in the run's" if "no mean" in said else "last mean") == (said != "")
    assert said in caplog.text


def test_what_no_mean_takes_is_said_once_for_a_run_of_so_many_updates(
    on_ranks: OnRanks, caplog: pytest.LogCaptureFixture
) -> None:
    def act(group: Group) -> None:
        run = trainer(group, updates=10)
        run.updates = 10  # as whatever takes back a state does
        run.updates = 11

    on_ranks(2, act)
    assert caplog.text.count("the run's 10 updates") == caplog.text.count("the run's 11 updates") == 1


def test_a_rate_that_was_changed_on_one_rank_only_is_found_in_the_next_share(on_ranks: OnRanks) -> None:
    class Changes(Hook):
        def after_update(self, event: Any) -> None:
            if event.update == 2 and not self.trainer.is_first_rank:
                self.trainer.optimizer.param_groups[0]["lr"] = 0.5

    def act(group: Group) -> str:
        with pytest.raises(ReplicaError) as caught:
            trainer(group, hooks=[Changes()]).train()
        return str(caught.value)

    assert all("at another learning rate" in said and "until update 4" in said for said in on_ranks(2, act))


def test_together_for_the_whole_run_has_the_bits_of_ordered(on_ranks: OnRanks) -> None:
    def act(group: Group) -> Any:
        def trained(strategy: Any) -> Tensor:
            net = Net()
            one = Engine(net, Square(), torch.optim.AdamW(net.parameters()), strategy=strategy, device="cpu")
            for update in range(5):
                x = torch.full((2, 1), 1.0 + update + group.rank, dtype=torch.float64)
                one.update((x, x[:, 0]), (-x, x[:, 0]))
            return held(net)

        ours = trained(Local(Ordered(group), synchronous_updates=5, every_updates=1))
        return torch.equal(ours, trained(Ordered(group)))

    assert on_ranks(2, act) == [True, True]


def test_one_update_at_a_time_averaged_is_the_mean_gradient_of_ddp(on_ranks: OnRanks) -> None:
    """Where ranks have equal weights and the inner optimizer is plain SGD: up to rounding, not to the bit."""

    def act(group: Group) -> float:
        def trained(strategy: Any) -> Tensor:
            net = Net()
            one = Engine(net, Square(), torch.optim.SGD(net.parameters(), lr=RATE), strategy=strategy, device="cpu")
            for update in range(5):
                x = torch.full((2, 1), 1.0 + update + group.rank, dtype=torch.float64)
                one.update((x, x[:, 0]))
            return held(net)

        return float((trained(Local(Ordered(group), every_updates=1)) - trained(Ordered(group))).abs().max())

    assert max(on_ranks(2, act)) < 1e-14


def test_with_another_number_of_ranks_or_strategy_a_checkpoint_is_refused_by_name(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    def begin(group: Group) -> None:
        trainer(group, updates=6, folder=tmp_path / "run", checkpoint=Checkpointing(asynchronous=False)).train()

    on_ranks(2, begin)

    def three(group: Group) -> str:
        with pytest.raises(CheckpointError) as caught:
            trainer(group).resume(tmp_path / "run")
        return str(caught.value)

    assert all("is of 2 ranks that step alone" in said and "but this run has 3" in said for said in on_ranks(3, three))

    def shared(group: Group) -> str:
        net = Net()
        with pytest.raises(CheckpointError) as caught:
            Trainer(
                model=net,
                task=Square(),
                optimizer=torch.optim.SGD(net.parameters(), lr=RATE),
                data=MapData(points(), global_batch_size=8, micro_batch_size=2, shuffle=False),
                updates=10,
                device="cpu",
                strategy=Ddp(group),
            ).resume(tmp_path / "run")
        return str(caught.value)

    assert all("resume with the strategy `local` on 2 ranks" in said for said in on_ranks(2, shared))


def test_before_ranks_step_alone_a_checkpoint_is_one_of_any_number_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    settings = {"synchronous_updates": 4}

    def begin(group: Group) -> None:
        checkpoint = Checkpointing(asynchronous=False)
        trainer(group, updates=3, folder=tmp_path / "run", checkpoint=checkpoint, settings=settings).train()

    on_ranks(2, begin)

    def go_on(group: Group) -> int:
        one = trainer(group, updates=6, settings=settings)
        one.resume(tmp_path / "run")
        one.train()
        return one.progress.update

    assert on_ranks(4, go_on) == [6] * 4


@pytest.mark.parametrize("update", [4, 6])
def test_the_state_that_a_hook_asks_for_is_that_after_what_ranks_share(on_ranks: OnRanks, update: int) -> None:
    """Hooks are told of an update before ranks meet; who asks for its state has them meet at once."""

    class Takes(Hook):
        def after_update(self, event: Any) -> None:
            if event.update == update:
                self.state = deepcopy(self.trainer.state_dict())

    def act(group: Group) -> list[Tensor]:
        takes, ended = Takes(), list[Tensor]()
        for hooks, state in (([takes], None), ([], takes)):
            one = trainer(group, hooks=hooks, train=Training(check_loss=False, ema=Ema(decay=0.7)))
            if state is not None:
                one.load_state_dict(state.state)
            one.train()
            ended.append(
                torch.cat([held(one.model), *(value.reshape(-1) for value in one.state_dict()["ema"].values())])
            )
        return ended

    own, _ = steps(2, 10)
    for rank, (first, second) in enumerate(on_ranks(2, act)):
        assert torch.equal(first, second) and (first[:2] - own[rank]).abs().max() < 1e-12


@pytest.mark.parametrize(("update", "goes_on_from"), [(3, 3), (4, 2)])
def test_after_an_error_in_a_hook_nothing_is_saved_of_an_update_that_ranks_have_not_shared(
    on_ranks: OnRanks, tmp_path: Path, update: int, goes_on_from: int
) -> None:
    class Raises(Hook):
        def after_update(self, event: Any) -> None:
            if event.update == update:
                raise ValueError("no")

    def act(group: Group) -> Any:
        def kept(*hooks: Hook) -> Trainer:
            train = Training(check_loss=False, ema=Ema(decay=0.7))
            checkpoint = Checkpointing(every_updates=2, asynchronous=False)
            return trainer(group, hooks=hooks, folder=tmp_path / "run", checkpoint=checkpoint, train=train)

        with pytest.raises(ValueError, match="no"):
            kept(Raises()).train()
        group.gather(None)  # all have saved what they could
        again = kept()
        again.resume("auto")
        begun = again.progress.update
        again.train()
        return begun, held(again.model)

    own, _ = steps(2, 10)
    for rank, (begun, parameters) in enumerate(on_ranks(2, act)):
        assert begun == goes_on_from and (parameters - own[rank]).abs().max() < 1e-12


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "retry": ({"failures": Failures(non_finite="retry")}, "learns by itself"),
    "overlap": ({"settings": {"overlap_updates": EVERY}}, "`overlap_updates` must be below the 4"),
    "fragments": ({"settings": {"fragments": 3}}, "`fragments` must be at most the 2 parameters"),
    "many fragments": ({"settings": {"fragments": 5}}, "`fragments` must be at most the 4"),
    "nesterov": ({"settings": {"nesterov": True}}, "`nesterov` is about the outer momentum"),
    "momentum": ({"settings": {"outer_momentum": 1.0}}, r"`outer_momentum` must be in \[0, 1\)"),
    "rate": ({"settings": {"outer_lr": 0.0}}, "`outer_lr` must be a finite number above 0"),
    "own share": ({"settings": {"own_share": 1.0}}, r"`own_share` must be in \[0, 1\)"),
    "state": ({"settings": {"inner_state": "average"}}, "`inner_state` must be one of keep, reset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_is_refused_when_the_run_is_built(name: str) -> None:
    more, says = REFUSED[name]
    with pytest.raises(ArgumentError, match=says):
        trainer(Group(), **more)


def test_replicas_that_hold_no_whole_models_are_refused() -> None:
    with pytest.raises(ArgumentError, match="`replicas` must be a strategy whose ranks hold all"):
        Local(Local(Ddp(Group())))


def test_a_rank_of_which_a_state_holds_nothing_begins_with_what_is_shared_and_a_new_optimizers_state() -> None:
    class Changing(Group):
        can_change = True

    def made() -> Trainer:
        net = Net()
        return Trainer(
            model=net,
            task=Square(),
            optimizer=torch.optim.Adagrad(net.parameters(), lr=RATE, initial_accumulator_value=0.25),
            data=MapData(points(), global_batch_size=8, micro_batch_size=2, shuffle=False),
            updates=6,
            device="cpu",
            strategy=Local(Ddp(Changing()), every_updates=EVERY),
            train=Training(check_loss=False),
            log=Logging(writers=()),
        )

    one, other = made(), made()
    one.train()
    state = one.state_dict()
    assert not torch.equal(held(one.model), torch.cat([value.reshape(-1) for value in state["model"].values()]))
    state["local"]["own"] = {"1": state["local"]["own"]["0"]}
    other.load_state_dict(state)
    assert torch.equal(held(other.model), torch.cat([value.reshape(-1) for value in state["model"].values()]))
    assert len(other.optimizer.state) == 2
    for kept in other.optimizer.state.values():
        assert float(kept["step"]) == 0 and bool((kept["sum"] == 0.25).all())
    assert other.progress.update == 6
