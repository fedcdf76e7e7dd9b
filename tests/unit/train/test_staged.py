"""A model in stages on several ranks, as threads, against the same on one process: the same bits."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Failures, MapData, Mixture, Reading, Trainer, Training
from evenstep.contrib.multitask import PcGrad, Scheduled, Uncertainty
from evenstep.data import RoundRobin
from evenstep.errors import ArgumentError, EvenstepError, ReplicaError
from evenstep.events import Hook
from evenstep.optim.schedules import Constant
from evenstep.parallel import Ddp, Mesh, Single
from evenstep.pipeline import SCHEDULES, PipelineModel
from kit import Squares, Weighted, data, deep, filled, points, trainer_of
from refused import refused
from same import assert_same

State = dict[str, Any]


def trained(model: Any, strategy: Any, *hooks: Hook, **more: Any) -> tuple[Trainer, State]:
    given: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        "data": data(22, size=10, micro=2, dtype=torch.float32),
        "updates": 4,
        "train": Training(clip_norm=0.5),
    }
    trainer = trainer_of(model, *hooks, strategy=strategy, **(given | more))
    trainer.train()
    return trainer, trainer.state_dict()


def check_same(mine: State, other: State) -> None:
    for part in ("model", "ema", "precision", "progress"):
        assert_same(mine[part], other[part], part)
    assert_same(mine["optimizer"]["state"], other["optimizer"]["state"])


@pytest.fixture(scope="module")
def alone() -> State:
    return trained(PipelineModel(deep()), Ddp(), train=Training(clip_norm=0.5, ema=Ema(decay=0.9)))[1]


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_pipeline_schedule_ends_at_the_bits_of_one_process(on_ranks: Any, alone: State, schedule: str) -> None:
    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=2)
        model = PipelineModel(deep(), mesh=mesh, schedule=schedule)
        return trained(model, Ddp(mesh.data), train=Training(clip_norm=0.5, ema=Ema(decay=0.9)))[1]

    check_same(on_ranks(2, act)[0], alone)


def test_metrics_and_evaluations_are_known_on_all_ranks(on_ranks: Any) -> None:
    def values(model: Any, strategy: Any) -> dict[str, float]:
        valid = data(7, size=7, micro=2, shuffle=False, dtype=torch.float32)
        train = Training(clip_norm=0.5, ema=Ema(decay=0.5))
        trainer, _ = trained(model, strategy, evaluations={"valid": valid}, train=train)
        return {name: trainer.storage.history(name)[-1].value for name in trainer.storage.names()}

    def act(group: Any) -> dict[str, float]:
        mesh = Mesh.of(group, pipeline=2)
        return values(PipelineModel(deep(), mesh=mesh, schedule="interleaved"), Single(mesh.data))

    wanted = values(PipelineModel(deep()), Single())
    assert {"train/loss", "valid/loss", "train/grad_norm", "train/lr"} <= wanted.keys()
    assert on_ranks(2, act) == [wanted, wanted]


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("injected")
        return x


@pytest.mark.parametrize("place", [0, 4])
def test_an_error_in_one_stage_wakes_the_others_with_rank_action_and_micro_batch(on_ranks: Any, place: int) -> None:
    def act(group: Any) -> str:
        mesh = Mesh.of(group, pipeline=2)
        layers: list[Any] = [layer.build for layer in deep(4).layers]
        layers.insert(place, Failing())
        some = data(5, size=5, micro=2, dtype=torch.float32)  # the third micro-batch has one row
        with pytest.raises((ValueError, EvenstepError)) as raised:
            model = PipelineModel(layers, mesh=mesh)
            trained(model, Single(mesh.data), data=some, train=Training(check_loss=False))
        return "\n".join([str(raised.value), *raised.value.__notes__])

    failed = 0 if place == 0 else 1
    assert all(f"action {failed}F2" in said for said in on_ranks(2, act))


def test_pipeline_ranks_with_different_batches_are_refused(on_ranks: Any) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        read = [(x + group.rank, y) for x, y in points(22, dtype=torch.float32)]
        some = MapData(read, global_batch_size=10, micro_batch_size=2)
        trained(PipelineModel(deep(4), mesh=mesh), Single(mesh.data), data=some)

    with refused(ReplicaError, "data"):
        on_ranks(2, act)


class Unread:
    """Samples, one of which one rank can't read."""

    def __init__(self, sample: int) -> None:
        self.points, self.sample = points(22, dtype=torch.float32), sample

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, number: int) -> Any:
        if number == self.sample:
            raise OSError("gone")
        return self.points[number]


def test_a_sample_unreadable_on_one_pipeline_rank_is_skipped_by_all_or_ends_the_run(on_ranks: Any) -> None:
    def ended(model: Any, strategy: Any, sample: int) -> State:
        reading = Reading(skip_failing=True, retries=0)
        some = MapData(Unread(sample), global_batch_size=5, micro_batch_size=5, shuffle=False, reading=reading)
        return trained(model, strategy, data=some, failures=Failures(max_skipped_samples=9))[1]

    def act(group: Any, sample: int) -> State:
        mesh = Mesh.of(group, pipeline=2)
        return ended(PipelineModel(deep(4), mesh=mesh), Single(mesh.data), sample)

    with refused(ReplicaError, "data"):
        on_ranks(2, lambda group: act(group, sample=7 if group.rank else -1))
    state = on_ranks(2, lambda group: act(group, sample=7))[0]
    check_same(state, ended(PipelineModel(deep(4)), Single(), 7))


def test_hooks_are_called_once_for_each_micro_batch_on_each_rank(on_ranks: Any) -> None:
    class Count(Hook):
        def __init__(self) -> None:
            self.said: list[str] = []

        def before_microbatch(self, event: Any) -> None:
            self.said.append(f"+{event.microbatch}")

        def after_microbatch(self, event: Any) -> None:
            self.said.append(f"-{event.microbatch}{'' if event.loss is None else ' loss'}")

    def act(group: Any) -> list[str]:
        mesh, count = Mesh.of(group, pipeline=2), Count()
        some = data(4, size=4, micro=2, dtype=torch.float32)
        trained(PipelineModel(deep(), mesh=mesh), Single(mesh.data), count, data=some, updates=1)
        return count.said

    assert on_ranks(2, act) == [["+0", "+1", "-0", "-1"], ["+0", "-0 loss", "+1", "-1 loss"]]


def test_activations_on_a_rank_do_not_grow_with_the_number_of_micro_batches(on_ranks: Any) -> None:
    def most(microbatches: int) -> Sequence[int]:
        def act(group: Any) -> int:
            mesh = Mesh.of(group, pipeline=2)
            alive: set[int] = set()
            peak = 0

            class Watched(nn.Module):
                def forward(self, x: Tensor) -> Tensor:
                    nonlocal peak
                    node = torch.autograd.graph.get_gradient_edge(x).node
                    alive.add(id(node))
                    y = x * 1
                    y.register_hook(lambda _: alive.discard(id(node)))
                    peak = max(peak, len(alive))
                    return y

            layers: list[Any] = [layer.build for layer in deep(4).layers]
            model = PipelineModel([layers[0], Watched(), *layers[1:]], mesh=mesh)
            some = data(microbatches, size=microbatches, micro=1, dtype=torch.float32)
            trained(model, Single(mesh.data), data=some, updates=1)
            return peak

        return on_ranks(2, act)

    assert most(16) == most(4) == [2, 0]


class Last(nn.Module):
    """The last stage: a head for each task, of which all are run."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = filled(nn.ModuleDict({name: nn.Linear(3, 1) for name in "abc"}), 9)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: head(x) for name, head in self.heads.items()}


class OfHead(Squares):
    """Trains one head; without a loss where a batch's last target is `silent`."""

    def __init__(self, head: str, silent: float) -> None:
        self.head, self.silent = head, silent

    def loss(self, output: Any, batch: Any) -> Any:
        return None if float(batch[1][-1]) == self.silent else super().loss(output[self.head], batch)


def with_heads() -> list[nn.Module]:
    trunk: list[Any] = [layer.build() for layer in deep(4).layers[:4]]  # type: ignore[operator]
    return [*trunk[:3], nn.BatchNorm1d(3), *trunk[3:], Last()]


def several(model: Any, strategy: Any, *, silent: float = -1.0, mixing: Any = None, **more: Any) -> State:
    sizes = {"a": 8, "b": 6, "c": 4}
    sets = {name: data(22, size=size, micro=2, dtype=torch.float32) for name, size in sizes.items()}
    given: dict[str, Any] = {
        "task": {name: OfHead(name, silent) for name in sizes},
        "data": Mixture(sets, mixing=mixing),
        "evaluations": {"valid": Mixture(sets, end="max")},
    }
    trainer, state = trained(model, strategy, **(given | more))
    return state | {"valid": {name: value for name, value in trainer.evaluate()["valid"].items() if "loss" in name}}


SEVERAL: dict[str, Callable[[], State]] = {
    "all in each update": dict,
    "some updates without any loss": lambda: {"silent": 1.0, "mixing": RoundRobin()},
    "scheduled coefficients": lambda: {
        "train": Training(clip_norm=0.5, coefficients=Scheduled({"b": Constant(warmup_updates=3)}))
    },
    "frozen statistics": lambda: {"train": Training(clip_norm=0.5, norm_statistics="frozen")},
}


@pytest.mark.parametrize("case", list(SEVERAL))
def test_several_tasks_in_stages_train_as_the_whole_model_does(on_ranks: Any, case: str) -> None:
    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=2)
        return several(PipelineModel(with_heads(), mesh=mesh), Ddp(mesh.data), **SEVERAL[case]())

    state, wanted = on_ranks(2, act)[0], several(nn.Sequential(*with_heads()), Ddp(), **SEVERAL[case]())
    check_same(state, wanted)
    assert state["valid"] == wanted["valid"]


@pytest.mark.parametrize(
    "more",
    [
        {"train": Training(coefficients=Uncertainty())},
        {"train": Training(combine=PcGrad())},
        {"task": {"a": Weighted(late=True), "b": Squares(), "c": Squares()}},
    ],
    ids=["learned coefficients", "combined gradients", "a late weight"],
)
def test_tasks_that_need_all_gradients_at_once_are_refused_for_stages(more: State) -> None:
    with pytest.raises(ArgumentError):
        several(PipelineModel(with_heads()), Ddp(), **more)
