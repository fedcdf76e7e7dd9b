"""Several tasks in one update, against plain PyTorch in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Batch, Engine, Hook, Loss, MapData, Mixture, Task, Trainer, Training, UpdateData
from evenstep.contrib.multitask import PcGrad, Scheduled, Uncertainty
from evenstep.data import AllTasks, Mixing
from evenstep.errors import ArgumentError, TaskError
from evenstep.events import Timer
from evenstep.optim.schedules import Linear
from refused import refused

BATCHES = {"a": 6, "b": 4}


def mixture(several: Any, *, micro: int = 2, repeats: dict[str, int] | None = None, count: int = 24) -> Mixture:
    return Mixture(
        {
            name: MapData(
                several.samples(count, seed), global_batch_size=size, micro_batch_size=min(micro, size), shuffle=False
            )
            for seed, (name, size) in enumerate(BATCHES.items())
        },
        mixing=AllTasks(repeats=repeats or {}),
    )


def trainer_of(several: Any, model: nn.Module, *, data: Any = None, **more: Any) -> Trainer:
    more.setdefault("task", {name: several.Regress(name) for name in BATCHES})
    more.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    more.setdefault("updates", 3)
    return Trainer(model=model, data=data or mixture(several), device="cpu", **more)


def divided(several: Any, model: nn.Module, name: str, batches: Sequence[Sequence[Any]]) -> Tensor:
    """One task's loss over whole batches."""
    sums, weights = [], []
    for batch in batches:
        x, y, v = several.stacked(list(batch))
        sums.append((v * (model(x, name) - y) ** 2).sum())
        weights.append(v.sum())
    return torch.stack(sums).sum() / torch.stack(weights).sum()


@given(
    micro=st.integers(1, 7),
    repeats=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    coefficients=st.tuples(st.sampled_from([1.0, 0.25]), st.sampled_from([1.0, 3.0])),
)
@settings(max_examples=25)
def test_the_update_is_that_of_whole_batches_for_every_cut(
    several: Any, micro: int, repeats: tuple[int, int], coefficients: tuple[float, float]
) -> None:
    counts, lambdas = dict(zip(BATCHES, repeats, strict=True)), dict(zip(BATCHES, coefficients, strict=True))
    model = several.model_of("a", "b")
    trainer_of(
        several,
        model,
        task={name: several.Regress(name) for name in BATCHES},
        data=mixture(several, micro=micro, repeats=counts, count=72),
        train=Training(coefficients=lambdas, clip_norm=0.5),
    ).train()
    wanted = several.model_of("a", "b")
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.5)
    places = dict.fromkeys(BATCHES, 0)
    for _ in range(3):
        optimizer.zero_grad()
        for seed, (name, size) in enumerate(BATCHES.items()):
            some = several.samples(72, seed)
            begins = [places[name] + size * number for number in range(counts[name])]
            places[name] = begins[-1] + size
            batches = [some[begin : begin + size] for begin in begins]
            (lambdas[name] * divided(several, wanted, name, batches)).backward()
        nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
        optimizer.step()
    torch.testing.assert_close(several.flat(model), several.flat(wanted), rtol=1e-12, atol=1e-14)


class Ends(Mixing):
    """All tasks, of which `task` takes part from update `first` to `last` only."""

    def __init__(self, task: str, first: int, last: int) -> None:
        self.task, self.first, self.last = task, first, last

    def __call__(self, number: int, sizes: Any, *, seed: int) -> list[str]:
        return [name for name in sizes if name != self.task or self.first <= number + 1 <= self.last]

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "ends", "last": self.last}


def test_every_form_of_batch_gives_the_accumulated_gradient_of_all(several: Any) -> None:
    a, b = several.samples(7, 0), several.samples(5, 1)
    forms = [(several.stacked(a[:2]), "a"), Batch(task="b", data=several.stacked(b)), (several.stacked(a[2:]), "a")]
    model = several.model_of("a", "b")
    trainer_of(several, model, data=UpdateData([tuple(forms)]), updates=1).train()
    wanted = several.model_of("a", "b")
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.5)
    for name, some in (("a", a), ("b", b)):
        divided(several, wanted, name, [some]).backward()
    optimizer.step()
    torch.testing.assert_close(several.flat(model), several.flat(wanted), rtol=1e-12, atol=1e-14)


def test_an_idle_task_leaves_its_head_and_its_optimizer_state_as_they_were(several: Any) -> None:
    model = several.model_of("a", "b")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    data = Mixture(mixture(several).data, mixing=Ends("b", 1, 2))
    trainer = trainer_of(several, model, data=data, optimizer=optimizer, updates=2)
    trainer.train()
    head = model.heads["b"]
    before = [value.clone() for value in (head.weight, head.bias)]
    state = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in (head.weight, head.bias)]
    trainer.updates = 5
    trainer._loop.updates = 5
    trainer.train()
    assert trainer.progress.update == 5
    assert all(torch.equal(old, new) for old, new in zip(before, (head.weight, head.bias), strict=True))
    now = [optimizer.state[p] for p in (head.weight, head.bias)]
    assert all(torch.equal(old[k], new[k]) for old, new in zip(state, now, strict=True) for k in old)
    assert float(optimizer.state[model.trunk[0].weight]["step"]) == 5


def test_a_task_of_weight_zero_contributes_nothing_and_all_of_them_abort(several: Any) -> None:
    nothing = [(x, y, v * 0) for x, y, v in several.samples(4, 1)]
    whole = several.stacked(several.samples(6, 0))
    updates = [((whole, "a"), (several.stacked(nothing), "b")), ((several.stacked(nothing), "b"),)]
    model = several.model_of("a", "b")
    trainer = trainer_of(several, model, data=UpdateData(updates), updates=2)
    head = several.flat(model.heads["b"])
    trainer.train()
    assert torch.equal(several.flat(model.heads["b"]), head)
    assert trainer.progress.skipped == 1


class Silent(Task):
    """Gives no loss for batches of odd size, in one way or the other."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def inputs(self, batch: Any) -> Any:
        return {"x": batch[0], "head": "b"}

    def loss(self, output: Any, batch: Any) -> Any:
        return self.context(output) if len(batch[0]) % 2 else (output**2).sum()


@pytest.mark.parametrize("context", [lambda output: None, lambda output: Loss(None), lambda output: output[:0]])
def test_a_batch_without_a_loss_is_accepted_and_counted_and_its_weight_counts(several: Any, context: Any) -> None:
    a, b, c = (several.stacked(several.samples(n, n)) for n in (4, 3, 2))
    model = several.model_of("a", "b")
    trainer = trainer_of(
        several,
        model,
        task={"a": several.Regress("a"), "b": Silent(context)},
        data=UpdateData([((a, "a"), (b, "b"), (c, "b"))]),
        updates=1,
    )
    trainer.train()
    count = trainer.storage.latest("train/b/no_loss")
    assert count is not None
    assert count.weight == 1
    wanted = several.model_of("a", "b")
    x, y, v = a
    ((v * (wanted(x, "a") - y) ** 2).sum() / v.sum() + (wanted(c[0], "b") ** 2).sum() / 5).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    torch.testing.assert_close(several.flat(model), several.flat(wanted), rtol=1e-12, atol=1e-14)


def test_coefficients_follow_their_schedule(several: Any) -> None:
    model = several.model_of("a", "b")
    schedule = Scheduled({"b": Linear(end_factor=0.0)}, values={"b": 2.0})
    trainer_of(several, model, train=Training(coefficients=schedule)).train()
    wanted = several.model_of("a", "b")
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.5)
    for update in range(3):
        optimizer.zero_grad()
        for seed, (name, size) in enumerate(BATCHES.items()):
            some = several.samples(24, seed)[size * update : size * (update + 1)]
            factor = 1.0 if name == "a" else 2.0 * (1.0, 0.5, 0.0)[update]
            (factor * divided(several, wanted, name, [some])).backward()
        optimizer.step()
    torch.testing.assert_close(several.flat(model), several.flat(wanted), rtol=1e-12, atol=1e-14)


def test_uncertainty_is_optimised_with_the_model_saved_and_idle_with_its_task(several: Any, tmp_path: Path) -> None:
    def run(folder: Path, updates: int, resume: bool) -> tuple[nn.Module, Trainer]:
        model = several.model_of("a", "b")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        trainer = trainer_of(
            several,
            model,
            data=Mixture(mixture(several).data, mixing=Ends("b", 1, 2)),
            optimizer=optimizer,
            train=Training(coefficients=Uncertainty(regression=("b",))),
            updates=updates,
            folder=folder,
        )
        if resume:
            trainer.resume()
        trainer.train()
        return model, trainer

    model, _ = run(tmp_path / "straight", 4, False)
    run(tmp_path / "stopped", 2, False)
    resumed, _ = run(tmp_path / "stopped", 4, True)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in model.state_dict().items())

    wanted = several.model_of("a", "b")
    s = {name: nn.Parameter(torch.zeros(())) for name in BATCHES}
    groups = [{"params": list(wanted.parameters())}, {"params": list(s.values()), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    for update in range(4):
        optimizer.zero_grad()
        for seed, (name, size) in enumerate(BATCHES.items()):
            if name == "a" or update < 2:
                some = several.samples(24, seed)[size * update : size * (update + 1)]
                loss = divided(several, wanted, name, [some])
                ((0.5 if name == "b" else 1.0) * torch.exp(-s[name]) * loss + s[name] / 2).backward()
        optimizer.step()
    torch.testing.assert_close(
        torch.cat([several.flat(model.trunk), several.flat(model.heads)]), several.flat(wanted), rtol=1e-6, atol=1e-8
    )
    for name, value in s.items():
        learned = model.get_parameter(f"task_coefficients.log_variance_{name}")
        assert float(learned.detach()) == pytest.approx(float(value.detach()), rel=1e-5)


@pytest.mark.parametrize("late", ["a", "b"])
@pytest.mark.parametrize("method", [None, PcGrad])
def test_weights_that_come_late_beside_other_tasks_are_divided_by(several: Any, late: str, method: Any) -> None:
    results = []
    for names in ("", late):
        model = several.model_of("a", "b")
        task = {name: several.Regress(name, late=name in names) for name in BATCHES}
        more = {"train": Training(combine=method and method(), coefficients={"b": 0.5}, clip_norm=0.5)}
        trainer_of(several, model, task=task, **more).train()
        results.append(several.flat(model))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_metrics_are_routed_by_task_and_the_loss_of_all_is_their_weighted_sum(several: Any) -> None:
    model = several.model_of("a", "b")
    trainer = trainer_of(
        several, model, train=Training(coefficients={"b": 0.5}), hooks=[Timer(every_updates=1)], updates=2
    )
    trainer.train()
    for update in (0, 1):
        a, b, both = (
            trainer.storage.history(name)[update].value for name in ("train/a/loss", "train/b/loss", "train/loss")
        )
        assert both == pytest.approx(a + 0.5 * b, rel=1e-12)
        assert trainer.storage.history("train/a/loss")[update].weight == 6


@pytest.mark.parametrize("late", ["", "a", "b"])
@pytest.mark.parametrize("silent", ["", "a", "b"])
def test_the_total_loss_is_the_weighted_sum_with_late_weights_and_empty_batches(
    several: Any, late: str, silent: str
) -> None:
    class Told(several.Regress):
        def loss(self, output: Any, batch: Any) -> Any:
            one = super().loss(output, batch)
            is_silent = self.head == silent and float(batch[1][0]) > 0
            return Loss(None, weight=one.weight) if is_silent else one

    model = several.model_of("a", "b")
    tasks = {name: Told(name, late=name in late) for name in BATCHES}
    trainer = trainer_of(several, model, task=tasks, train=Training(coefficients={"b": 0.5}), updates=4)
    trainer.train()
    of_a, of_b, of_all = (trainer.storage.history(f"train/{name}loss") for name in ("a/", "b/", ""))
    assert [one.value for one in of_all] == pytest.approx(
        [a.value + 0.5 * b.value for a, b in zip(of_a, of_b, strict=True)], rel=1e-12
    )


@pytest.mark.parametrize("method", [None, PcGrad])
def test_a_head_is_unchanged_where_the_early_or_late_weight_of_its_task_is_0(several: Any, method: Any) -> None:
    a, b = (several.stacked(several.samples(4, seed)) for seed in (0, 1))
    ends: list[Tensor] = []
    for late in (False, True):
        model = several.model_of("a", "b")
        tasks = {"a": several.Regress("a"), "b": several.Regress("b", late=late)}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        engine = Engine(model, tasks, optimizer, device="cpu", train=Training(combine=method and method()))
        engine.update(microbatches=[(a, "a"), (b, "b")])
        engine.update(microbatches=[(a, "a"), ([b[0], b[1], b[2] * 0], "b")])
        ends.append(several.flat(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)


def test_evaluations_are_by_task_too(several: Any) -> None:
    model = several.model_of("a", "b")
    valid = Mixture(
        {name: MapData(several.samples(n, 9), global_batch_size=2, shuffle=False) for name, n in (("a", 5), ("b", 3))},
        end="max",
    )
    trainer = trainer_of(several, model, evaluations={"valid": valid})
    trainer.train()
    metrics = trainer.evaluate("valid")["valid"]
    for name, count in (("a", 5), ("b", 3)):
        with torch.no_grad():
            wanted = divided(several, model, name, [several.samples(count, 9)])
        assert metrics[f"{name}/loss"] == pytest.approx(float(wanted), rel=1e-12)


def test_a_run_that_is_stopped_within_the_mixtures_epoch_goes_on_with_the_same_bits(
    several: Any, tmp_path: Path
) -> None:
    def run(folder: Path, ends: Sequence[int]) -> dict[str, Any]:
        for end in ends:
            model = several.model_of("a", "b")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            trainer = trainer_of(several, model, optimizer=optimizer, updates=end, folder=folder)
            trainer.resume()
            trainer.train()
        state = trainer.state_dict()
        return {**state["model"], "progress": state["progress"]}

    straight, stopped = run(tmp_path / "one", [9]), run(tmp_path / "two", [2, 5, 9])
    assert straight.pop("progress") == stopped.pop("progress")
    assert all(torch.equal(value, stopped[name]) for name, value in straight.items())


def test_a_model_in_evaluation_mode_is_not_trained(several: Any) -> None:
    class Evals(Hook):
        def after_update(self, event: Any) -> None:
            self.trainer.model.eval()

    with pytest.raises(TaskError):
        trainer_of(several, several.model_of("a", "b"), hooks=[Evals()]).train()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"task": {}}, "`task` must be a Task, or tasks by name, but is empty"),
        ({"task": 3}, "`task` must be an object of a subclass of `evenstep.Task`"),
        ({"task": {"a/b": "a"}}, "`a/b` must have a name of letters"),
        ({"task": {"loss": "a"}}, "`loss` must have a name of letters"),
        ({"task": {"a": "a", "c": "c"}}, "`data` has batches of task `b`, which the run has not"),
        ({"train": Training(coefficients={"c": 1.0})}, "`coefficients` names task `c`, but the run has a, b"),
        ({"single": True}, r"`data` has batches of task `a`, but the run's task has no name"),
        ({"plain": True}, "does not say which task a batch is for"),
    ],
)
def test_what_cannot_be_is_refused_when_the_trainer_is_built(several: Any, change: dict[str, Any], text: str) -> None:
    more = dict(change)
    task = {name: several.Regress(name) for name in BATCHES}
    if isinstance(more.get("task"), dict):
        task = {name: several.Regress(head) for name, head in more.pop("task").items()}
    if more.pop("single", False):
        task = several.Regress("a")
    data = MapData(several.samples(4, 0), global_batch_size=2) if more.pop("plain", False) else None
    with pytest.raises(ArgumentError):
        trainer_of(several, several.model_of("a", "b"), data=data, **{"task": task, **more})


def test_a_task_looks_at_the_model_once_before_anything_is_trained_and_may_refuse_it() -> None:
    seen: list[nn.Module] = []

    class Looks(Task):
        def prepare(self, model: nn.Module) -> None:
            seen.append(model)
            if not isinstance(model, nn.Linear):
                raise ArgumentError("only a linear layer will do.")

        def loss(self, output: Any, batch: Any) -> Tensor:
            return output.sum()

    def built(model: nn.Module) -> Engine:
        return Engine(model, Looks(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")

    linear = nn.Linear(1, 1)
    built(linear)
    assert seen == [linear]
    with pytest.raises(ArgumentError):
        built(nn.Sequential(nn.Linear(1, 1)))


def test_two_tasks_with_late_weights_in_one_update_are_refused(several: Any) -> None:
    tasks = {name: several.Regress(name, late=True) for name in BATCHES}
    with refused(TaskError, "b"):
        trainer_of(several, several.model_of("a", "b"), task=tasks).train()
