"""A model in stages on several ranks, as threads, against the same on one process: the same bits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Failures, Hook, MapData, Mixture, Reading, Task, Trainer, Training
from evenstep.contrib.multitask import PcGrad, Scheduled, Uncertainty
from evenstep.data import RoundRobin
from evenstep.errors import ArgumentError, CheckpointError, EvenstepError, ReplicaError
from evenstep.optim.schedules import Constant
from evenstep.parallel import Ddp, Mesh, Single, Strategy
from evenstep.pipeline import SCHEDULES, Action, Layout, Op, PipelineModel, Schedule
from evenstep.train.agreement import check_ties
from evenstep.train.state.optimizer_state import parameter_names
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


def one_by_one(layout: Layout, microbatches: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        tuple(Action(op, stage, each) for each in microbatches for op in (Op.FORWARD, Op.BACKWARD))
        for stage in range(layout.stages)
    )


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule(name="mine", order=one_by_one, summary="least memory")])
def test_every_pipeline_schedule_ends_at_the_bits_of_one_process(on_ranks: Any, alone: State, schedule: Any) -> None:
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


def layers() -> nn.Sequential:
    """Five linear layers, of which the second and the fourth are frozen."""
    made = filled(nn.Sequential(*(nn.Linear(3, 1 if place == 4 else 3) for place in range(5))))
    for place in (1, 3):
        made[place].requires_grad_(False)
    return made


def built(model: nn.Module, *hooks: Hook, **more: Any) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    some = data(8, micro=2, dtype=torch.float32)
    return trainer_of(model, *hooks, data=some, optimizer=optimizer, train=Training(clip_norm=0.5), **more)


@pytest.mark.parametrize("stages", [1, 2])
def test_to_go_on_with_others_frozen_is_refused_unless_it_is_meant(on_ranks: Any, tmp_path: Path, stages: int) -> None:
    def made(group: Any, *thawed: str, **more: Any) -> Trainer:
        mesh = Mesh.of(group, pipeline=stages)
        model = PipelineModel(layers(), mesh=mesh)
        for name, parameter in model.named_parameters():
            if name in thawed:
                parameter.requires_grad_(True)
        return built(model, strategy=Ddp(mesh.data), folder=tmp_path, **{"updates": 4} | more)

    def act(group: Any) -> Any:
        made(group, updates=2).train()
        with pytest.raises(CheckpointError):
            made(group, "3.weight").resume()
        meant = made(group, "3.weight")
        meant.resume(new_settings=True)
        return {name: one.requires_grad for name, one in meant.model.named_parameters() if name.startswith("3")}

    assert {"3.weight": True, "3.bias": False} in on_ranks(2, act)


class Sum(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return output.sum()


def tied() -> nn.Sequential:
    model = filled(nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(4)]))
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("last", [0, 1, None])
def test_copies_of_one_parameter_must_be_in_the_same_group_on_all_ranks(on_ranks: Any, last: int | None) -> None:
    def act(group: Any) -> bool:
        model = PipelineModel(tied(), mesh=Mesh.of(group, pipeline=2))
        own = dict(model.named_parameters())
        name, place = ("0.weight", 0) if "0.weight" in own else ("3.weight", last)
        groups: list[dict[str, Any]] = [{"params": [], "lr": 1.0}, {"params": [], "lr": 0.1}]
        if place is not None:
            groups[place]["params"] = [own[name]]
        try:
            check_ties(model, parameter_names(model, torch.optim.SGD(groups)))
        except ArgumentError:
            return False
        return True

    assert on_ranks(2, act) == [last == 0] * 2


class Freeze(Hook):
    """Freezes parameters of some names before update 2."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def before_update(self, event: Any) -> None:
        for name, one in self.trainer.model.named_parameters():
            if event.update == 2 and name in self.names:
                one.requires_grad_(False)


def freezing(model: nn.Module, strategy: Strategy, *frozen: str, state: Any = None) -> Any:
    some = data(6, size=2, micro=1, dtype=torch.float32)
    updates = 2 if state is None else 4
    one = trainer_of(model, Freeze(frozen), task=Sum(), data=some, updates=updates, strategy=strategy)
    if state is not None:
        one.load_state_dict(state)
    one.train()
    return one.state_dict()


@pytest.mark.parametrize("is_built", [True, False])
def test_partly_frozen_copies_of_one_parameter_are_refused_on_all_ranks(on_ranks: Any, is_built: bool) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        model = PipelineModel(tied(), mesh=mesh)
        for name, one in model.named_parameters():
            one.requires_grad_(not (is_built and name == "3.weight"))
        with pytest.raises(EvenstepError):
            freezing(model, Single(mesh.data), *(() if is_built else ("3.weight",)))

    on_ranks(2, act)


def test_a_tied_parameter_that_was_frozen_in_mid_run_stays_so_in_other_stages(on_ranks: Any) -> None:
    """Rank 0 has nothing else in its stage that is freezing, and others have."""
    names = ("0.weight", "1.weight", "3.weight")

    def act(group: Any, state: Any = None) -> Any:
        mesh = Mesh.of(group, pipeline=2)
        return freezing(PipelineModel(tied(), mesh=mesh), Single(mesh.data), *names, state=state)

    whole = freezing(tied(), Single(), *names)
    wanted = freezing(tied(), Single(), *names, state=whole)["model"]
    for begun in (whole, on_ranks(2, lambda group: act(group, whole))[0]):
        gone_on = on_ranks(2, lambda group, begun=begun: act(group, begun))[0]["model"]
        assert all(torch.equal(gone_on[name], value) for name, value in wanted.items())
    assert not torch.equal(wanted["2.weight"], whole["model"]["2.weight"])
