"""The update against references of a few lines: any cut, any weights, any way of applying."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Ema, Failures, Hook, Loss, MapData, Task, Trainer, Training
from evenstep.errors import NonFiniteError, TaskError
from evenstep.precision import Fp16Mixed
from evenstep.train import Skip

CPU = torch.device("cpu")


class Weighted(Task):
    """Σ w·(output - y)², weighing Σ w; counted ahead or late."""

    def __init__(self, late: bool = False) -> None:
        self.late_weight = late

    def weight(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def loss(self, output: Any, batch: Any) -> Loss:
        total = (batch[2] * (output.squeeze(-1) - batch[1]) ** 2).sum()
        return Loss(total, weight=batch[2].sum() if self.late_weight else None)


def dataset(weights: list[float], seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4, generator=generator, dtype=torch.float64),
            torch.randn((), generator=generator, dtype=torch.float64),
            torch.tensor(weight, dtype=torch.float64),
        )
        for weight in weights
    ]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trainer_of(model: nn.Module, data: Any, *, micro: int, late: bool = False, lr: float = 0.1, **more: Any) -> Trainer:
    fused = more.pop("fused", False)
    size = more.pop("global_batch_size", 12)
    more.setdefault("updates", 3)
    return Trainer(
        model=model,
        task=more.pop("task", None) or Weighted(late),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5, fused=fused),
        data=MapData(data, global_batch_size=size, micro_batch_size=min(micro, size), shuffle=False),
        device="cpu",
        **more,
    )


def reference(data: list[tuple[Tensor, Tensor, Tensor]], *, updates: int, size: int, clip: float | None) -> Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    begins = list(range(0, len(data), size))
    place = done = 0
    while done < updates:
        batch = data[begins[place % len(begins)] :][:size]
        place += 1
        x, y, w = (torch.stack([sample[part] for sample in batch]) for part in range(3))
        if w.sum() == 0:
            continue
        optimizer.zero_grad()
        ((w * (model(x).squeeze(-1) - y) ** 2).sum() / w.sum()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        done += 1
    return flat(model)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=5, max_size=30).filter(lambda w: sum(w) > 0),
    size=st.integers(2, 12),
    micro=st.integers(1, 12),
    late=st.booleans(),
    clip=st.sampled_from([None, 0.1]),
)
@settings(max_examples=30, deadline=None)
def test_no_cut_changes_the_parameters(
    weights: list[float], size: int, micro: int, late: bool, clip: float | None
) -> None:
    data, model = dataset(weights), network()
    trainer_of(model, data, micro=micro, late=late, global_batch_size=size, train=Training(clip_norm=clip)).train()
    wanted = reference(data, updates=3, size=size, clip=clip)
    torch.testing.assert_close(flat(model), wanted, rtol=1e-12, atol=1e-14)


class Breaks(nn.Module):
    """Gives NaN in chosen calls of its forward in training; counts them."""

    def __init__(self, calls: set[int]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.calls, self.call = calls, -1

    def forward(self, x: Tensor) -> Tensor:
        self.call += self.training
        output = self.inner(x.float())
        return output * math.nan if self.training and self.call in self.calls else output


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1].float()) ** 2).sum()


def breaking(calls: set[int], settle: int | None, **more: Any) -> tuple[Breaks, Trainer]:
    torch.manual_seed(1)
    model = Breaks(calls)
    more = {"updates": 7, "task": Square(), **more}
    return model, trainer_of(
        model,
        dataset([1.0] * 36),
        micro=6,
        lr=0.01,
        fused=True,
        train=Training(ema=Ema(decay=0.5), settle_every_updates=settle),
        failures=Failures(non_finite=Skip()),
        **more,
    )


def test_a_verdict_that_stays_on_the_device_gives_the_same_bits_however_late_it_is_read() -> None:
    states: list[dict[str, Any]] = []
    for settle in (2, 3, 100):
        model, trainer = breaking(set(), settle)
        trainer.train()
        states.append({**model.state_dict(), **{f"ema {k}": v for k, v in trainer.state_dict()["ema"].items()}})
        assert trainer.progress.update == 7
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])


@pytest.mark.parametrize("settle", [None, 2, 5])
def test_a_skipped_update_leaves_no_trace_however_late_it_is_noticed(settle: int | None) -> None:
    # Global batch 1 of epoch 0 breaks in its second micro-batch (call 3); the run without it is the reference.
    model, trainer = breaking({3}, settle)
    trainer.train()
    assert trainer.progress.skipped == 1
    assert trainer.progress.update == 7
    assert (trainer.progress.position.epoch, trainer.progress.position.batch) == (2, 2)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert int(model.inner[1].num_batches_tracked) == 2 * 7
    updates = [record.update for record in trainer.storage.history("train/loss")]
    assert updates == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_state_of_a_task_from_an_aborted_update_is_rolled_back_even_if_found_late(kind: str) -> None:
    class Remembers(Square):
        def __init__(self) -> None:
            self.mean, self.ended = torch.zeros(()), [0]

        def loss(self, output: Any, batch: Any) -> Tensor:
            if self.now.is_training and kind == "in place":
                self.mean.mul_(0.9).add_(output.detach().mean())
            elif self.now.is_training:
                self.mean = self.mean * 0.9 + output.detach().mean()
            return super().loss(output, batch)

        def after_update(self, event: Any) -> None:
            if event.committed:
                self.ended.append(event.update)

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean, "ended": self.ended}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean, self.ended = state["mean"], state["ended"]

    states: list[dict[str, Any]] = []
    for settle in (None, 2, 5):
        task = Remembers()
        breaking({7}, settle, task=task)[1].train()
        assert torch.isfinite(task.mean)
        states.append(task.state_dict())
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("settle", [None, 2, 5])
def test_an_overflow_is_tried_again_with_the_same_batch_and_nothing_else_notices(settle: int | None) -> None:
    """Overflows are forced by a loss scale that float32 can't hold; the reference starts at a small one."""

    def run(initial: float) -> tuple[nn.Module, Trainer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
        data = [(x.float(), y.float()) for x, y, _ in dataset([1.0] * 36)]
        precision = Fp16Mixed(initial=initial, growth_updates=10_000)
        trainer = trainer_of(
            model,
            data,
            micro=6,
            task=Square(),
            lr=0.01,
            fused=True,
            precision=precision,
            train=Training(settle_every_updates=settle),
        )
        trainer.train()
        return model, trainer

    model, trainer = run(2.0**24)
    calm, calm_trainer = run(float(trainer.state_dict()["precision"]["scale"]))
    assert trainer.state_dict()["precision"]["scale"] < 2.0**24
    assert trainer.progress == calm_trainer.progress
    for name, value in model.state_dict().items():
        assert torch.equal(value, calm.state_dict()[name]), name


@pytest.mark.parametrize("more", [{"late": True}, {"train": Training(clip_norm=0.1)}])
def test_a_gradient_replaced_by_a_hook_is_divided_and_clipped_like_the_original(more: Any) -> None:
    class Halves(Hook):
        def __init__(self, *, in_place: bool) -> None:
            self.in_place = in_place

        def before_step(self, event: Any) -> None:
            for parameter in self.trainer.model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.mul_(0.5) if self.in_place else parameter.grad * 0.5

    ended = [network(), network()]
    for model, in_place in zip(ended, (True, False), strict=True):
        trainer_of(model, dataset([3.0] * 24), micro=4, hooks=[Halves(in_place=in_place)], **more).train()
    assert torch.equal(*map(flat, ended)) and not torch.equal(flat(ended[0]), flat(network()))


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_the_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    data = dataset([1.0] * 24)
    data[13][0][2] = math.nan
    trainer = trainer_of(model, data, micro=4)
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert trainer.progress.update == 1
    assert torch.isfinite(flat(model)).all()
    assert [record.update for record in trainer.storage.history("train/loss")] == [1]


def test_a_loss_that_no_parameter_of_the_model_moves_stops_the_run_and_says_so() -> None:
    class Anew(Weighted):
        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss(torch.tensor(float(output.detach().sum()), requires_grad=True))

    trainer = trainer_of(network(), dataset([1.0] * 12), micro=4, task=Anew())
    with pytest.raises(TaskError):
        trainer.train()
    assert trainer.progress.update == 0


def test_skipping_has_a_limit() -> None:
    data = dataset([1.0] * 24)
    for x, _, _ in data:
        x[0] = math.nan
    trainer = trainer_of(network(), data, micro=4, failures=Failures(non_finite=Skip(limit=3)))
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert (trainer.progress.update, trainer.progress.skipped) == (0, 3)


def test_dropout_depends_on_seed_update_and_microbatch_only() -> None:
    def run(seed: int, disturb: bool) -> Tensor:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1)).double()
        trainer = trainer_of(model, dataset([1.0] * 24), micro=4, seed=seed)
        if disturb:
            torch.manual_seed(99)
            torch.rand(1000)
        trainer.train()
        return flat(model)

    assert torch.equal(run(3, False), run(3, True))
    assert not torch.equal(run(3, False), run(4, False))


@pytest.mark.parametrize("settle", [None, 5])
def test_a_batch_without_weight_changes_nothing_of_the_updates_after_it(settle: int | None) -> None:
    data = [(x.float(), y.float(), w.float()) for x, y, w in dataset([1.0] * 12 + [0.0] * 12 + [1.0] * 36)]
    results: list[Tensor] = []
    for some in (data, data[:12] + data[24:]):
        model = network().float()
        trainer = trainer_of(model, some, micro=4, fused=True, updates=4, train=Training(settle_every_updates=settle))
        trainer.train()
        results.append(flat(model))
    # the keys of micro-batches are those of updates, so nothing else differs
    assert torch.equal(*results)


def test_a_verdict_that_only_the_device_knows_is_not_read_for_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A truth test of a tensor makes the host wait for the device, here in each update."""
    read: list[str] = []
    model = network()
    trainer = trainer_of(
        model,
        dataset([1.0] * 12),
        micro=6,
        train=Training(ema=Ema(decay=0.5), settle_every_updates=2),
        updates=2,
        fused=True,
    )
    apply = trainer._loop.engine.parts.core._apply  # type: ignore[attr-defined]

    class Unread(Tensor):
        """Says that it was read."""

        def __bool__(self) -> bool:
            read.append("read")
            return super().__bool__()

    def unread(*args: Any, **more: Any) -> Any:
        applied = apply(*args, **more)
        return applied._replace(aborted=torch.as_tensor(applied.aborted, dtype=torch.float64).as_subclass(Unread))

    unread.resume, unread.may_draw = apply.resume, apply.may_draw  # type: ignore[attr-defined]
    monkeypatch.setattr(trainer._loop.engine.parts.core, "_apply", unread)
    trainer.train()
    assert read == []
