"""Several tasks in one update, against plain PyTorch in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Batch, Hook, Loss, Mixture, Task, Trainer, Training, UpdateData
from evenstep.contrib.multitask import PcGrad, Uncertainty
from evenstep.data import AllTasks, MapData, Mixing
from evenstep.errors import ArgumentError, TaskError
from kit import Regress, engine_of, flat, heads, history, samples, stacked
from kit import trainer_of as trainer_of_kit
from same import assert_same

BATCHES = {"a": 6, "b": 4}


def mixture(*, micro: int = 2, repeats: dict[str, int] | None = None, count: int = 24, mixing: Any = None) -> Mixture:
    sets = {
        name: MapData(samples(count, seed), global_batch_size=size, micro_batch_size=min(micro, size), shuffle=False)
        for seed, (name, size) in enumerate(BATCHES.items())
    }
    return Mixture(sets, mixing=mixing or AllTasks(repeats=repeats or {}))


def trainer_of(model: nn.Module, **more: Any) -> Trainer:
    more.setdefault("task", {name: Regress(name) for name in BATCHES})
    more.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    more.setdefault("data", mixture())
    return trainer_of_kit(model, *more.pop("hooks", ()), **({"updates": 3} | more))


def divided(model: nn.Module, name: str, *batches: Sequence[Any]) -> Tensor:
    """One task's loss over whole batches."""
    x, y, v = stacked([sample for batch in batches for sample in batch])
    return (v * (model(x, name) - y) ** 2).sum() / v.sum()


def close(model: nn.Module, wanted: nn.Module) -> None:
    torch.testing.assert_close(flat(model), flat(wanted), rtol=1e-12, atol=1e-14)


@given(
    micro=st.integers(1, 7),
    repeats=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    coefficients=st.tuples(st.sampled_from([1.0, 0.25]), st.sampled_from([1.0, 3.0])),
)
@settings(max_examples=15)
def test_the_update_is_that_of_whole_batches_for_every_cut(
    micro: int, repeats: tuple[int, int], coefficients: tuple[float, float]
) -> None:
    counts, lambdas = dict(zip(BATCHES, repeats, strict=True)), dict(zip(BATCHES, coefficients, strict=True))
    model, wanted = heads("a", "b"), heads("a", "b")
    train = Training(coefficients=lambdas, clip_norm=0.5)
    trainer_of(model, data=mixture(micro=micro, repeats=counts, count=72), train=train).train()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.5)
    for update in range(3):
        optimizer.zero_grad()
        for seed, (name, size) in enumerate(BATCHES.items()):
            used = size * counts[name]
            some = samples(72, seed)[used * update : used * (update + 1)]
            (lambdas[name] * divided(wanted, name, some)).backward()
        nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
        optimizer.step()
    close(model, wanted)


class Ends(Mixing):
    """All tasks, of which `b` takes part in the first two updates only."""

    def __call__(self, number: int, sizes: Any, *, seed: int) -> list[str]:
        return [name for name in sizes if name == "a" or number < 2]

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "ends"}


def test_every_form_of_batch_gives_the_accumulated_gradient_of_all() -> None:
    a, b = samples(7, 0), samples(5, 1)
    forms = [(stacked(a[:2]), "a"), Batch(task="b", data=stacked(b)), (stacked(a[2:]), "a")]
    model, wanted = heads("a", "b"), heads("a", "b")
    trainer_of(model, data=UpdateData([tuple(forms)]), updates=1).train()
    (divided(wanted, "a", a) + divided(wanted, "b", b)).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    close(model, wanted)


def test_an_idle_task_leaves_its_head_and_its_optimizer_state_as_they_were() -> None:
    model = heads("a", "b")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    kept: list[Tensor] = []

    class Keep(Hook):
        def after_update(self, event: Any) -> None:
            state = [value for one in model.heads["b"].parameters() for value in optimizer.state[one].values()]
            kept.append(torch.cat([flat(model.heads["b"]), *(value.flatten() for value in state)]))

    trainer_of(model, data=mixture(mixing=Ends()), optimizer=optimizer, updates=4, hooks=[Keep()]).train()
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], kept[3])
    assert float(optimizer.state[model.trunk[0].weight]["step"]) == 4


def test_a_task_of_weight_zero_contributes_nothing_and_all_of_them_abort() -> None:
    nothing = stacked([(x, y, v * 0) for x, y, v in samples(4, 1)])
    updates = [((stacked(samples(6, 0)), "a"), (nothing, "b")), ((nothing, "b"),)]
    model = heads("a", "b")
    trainer = trainer_of(model, data=UpdateData(updates), updates=2)
    head = flat(model.heads["b"])
    trainer.train()
    assert torch.equal(flat(model.heads["b"]), head)
    assert trainer.progress.skipped == 1


@pytest.mark.parametrize("nothing", [lambda output: None, lambda output: Loss(None), lambda output: output[:0]])
def test_a_batch_without_a_loss_is_accepted_and_its_weight_counts(nothing: Any) -> None:
    class Silent(Task):
        """Gives no loss for batches of odd size."""

        def inputs(self, batch: Any) -> Any:
            return {"x": batch[0], "head": "b"}

        def loss(self, output: Any, batch: Any) -> Any:
            return nothing(output) if len(batch[0]) % 2 else (output**2).sum()

    a, b, c = (stacked(samples(n, n)) for n in (4, 3, 2))
    model, wanted = heads("a", "b"), heads("a", "b")
    updates = UpdateData([((a, "a"), (b, "b"), (c, "b"))])
    trainer = trainer_of(model, task={"a": Regress("a"), "b": Silent()}, data=updates, updates=1)
    trainer.train()
    count = trainer.storage.latest("train/b/no_loss")
    assert count is not None and count.weight == 1
    (divided(wanted, "a", samples(4, 4)) + (wanted(c[0], "b") ** 2).sum() / 5).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    close(model, wanted)


def test_uncertainty_is_optimised_with_the_model_saved_and_idle_with_its_task(tmp_path: Path) -> None:
    def run(folder: Path, *ends: int) -> dict[str, Tensor]:
        for updates in ends:
            model = heads("a", "b")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
            train = Training(coefficients=Uncertainty(regression=("b",)))
            some = mixture(mixing=Ends())
            trainer = trainer_of(model, data=some, optimizer=optimizer, train=train, updates=updates, folder=folder)
            trainer.resume()
            trainer.train()
        return model.state_dict()

    early, straight, stopped = (
        run(tmp_path / "early", 2),
        run(tmp_path / "straight", 4),
        run(tmp_path / "stopped", 2, 4),
    )
    assert_same(straight, stopped)
    a, b = (f"task_coefficients.log_variance_{name}" for name in "ab")
    assert early[a] != straight[a] and early[b] == straight[b] != 0


@pytest.mark.parametrize("late", ["a", "b"])
@pytest.mark.parametrize("method", [None, PcGrad])
def test_weights_that_come_late_beside_other_tasks_are_divided_by(late: str, method: Any) -> None:
    models = [heads("a", "b") for _ in range(2)]
    for names, model in zip(("", late), models, strict=True):
        task = {name: Regress(name, late=name in names) for name in BATCHES}
        train = Training(combine=method and method(), coefficients={"b": 0.5}, clip_norm=0.5)
        trainer_of(model, task=task, train=train).train()
    close(*models)


@pytest.mark.parametrize(("late", "silent"), [("", ""), ("a", "b"), ("b", "b")])
def test_the_total_loss_is_the_weighted_sum_with_late_weights_and_empty_batches(late: str, silent: str) -> None:
    class Silent(Regress):
        def loss(self, output: Any, batch: Any) -> Any:
            one = super().loss(output, batch)
            is_silent = self.head == silent and float(batch[1][0]) > 0
            return Loss(None, weight=one.weight) if is_silent else one

    tasks = {name: Silent(name, late=name in late) for name in BATCHES}
    trainer = trainer_of(heads("a", "b"), task=tasks, train=Training(coefficients={"b": 0.5}), updates=4)
    trainer.train()
    of_a, of_b, of_all = (history(trainer, f"train/{name}loss") for name in ("a/", "b/", ""))
    assert of_all == pytest.approx([a + 0.5 * b for a, b in zip(of_a, of_b, strict=True)], rel=1e-12)


@pytest.mark.parametrize("method", [None, PcGrad])
def test_a_head_is_unchanged_where_the_early_or_late_weight_of_its_task_is_0(method: Any) -> None:
    a, b = (stacked(samples(4, seed)) for seed in (0, 1))
    models = [heads("a", "b") for _ in range(2)]
    for late, model in zip((False, True), models, strict=True):
        tasks = {"a": Regress("a"), "b": Regress("b", late=late)}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        engine = engine_of(model, tasks, optimizer=optimizer, train=Training(combine=method and method()))
        engine.update(microbatches=[(a, "a"), (b, "b")])
        engine.update(microbatches=[(a, "a"), ([b[0], b[1], b[2] * 0], "b")])
    close(*models)


class Evals(Hook):
    def after_update(self, event: Any) -> None:
        self.trainer.model.eval()


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"task": {}}, ArgumentError),
        ({"task": 3}, ArgumentError),
        ({"task": {"a/b": Regress("a")}}, ArgumentError),
        ({"task": {"loss": Regress("a")}}, ArgumentError),
        ({"task": {"a": Regress("a"), "c": Regress("c")}}, ArgumentError),
        ({"train": Training(coefficients={"c": 1.0})}, ArgumentError),
        ({"task": Regress("a")}, ArgumentError),
        ({"data": MapData(samples(4), global_batch_size=2)}, ArgumentError),
        ({"task": {name: Regress(name, late=True) for name in BATCHES}}, TaskError),
        ({"hooks": [Evals()]}, TaskError),
    ],
)
def test_tasks_that_do_not_fit_are_refused(more: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        trainer_of(heads("a", "b"), **more).train()
