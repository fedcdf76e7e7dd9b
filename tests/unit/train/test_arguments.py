"""Trainers that are refused when they are built: launched without a strategy, or sharing with the wrong ranks."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import evenstep
from evenstep import Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Group, Mesh, Single
from evenstep.pipeline import PipelineModel
from evenstep.train.checks import check_model
from kit import data, engine_of, filled, line, trainer_of
from refused import refused

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
IN_SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "a1",
}
MAY_GO = {"TORCHFT_LIGHTHOUSE": "http://a:1", "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"}
FAST = partial(Ddp, reduction="fast")


def built(model: nn.Module | None = None, **more: Any) -> Trainer:
    return trainer_of(model or line(), data=data(4, size=4, micro=1), updates=1, **more)


def layers() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double())


@pytest.mark.parametrize("environ", [LAUNCHED, IN_SLURM])
def test_two_processes_without_a_strategy_are_refused(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with refused(ArgumentError, "strategy"):
        built()
    assert built(strategy=Single()).train().update == 1  # a run of its own


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp", Ddp(), FAST(Group())])
def test_a_strategy_that_does_not_know_of_ranks_that_come_and_go_is_refused(
    monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    for name, value in MAY_GO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError):
        built(strategy=strategy)
    assert built(strategy=Single()).train().update == 1
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "1")
    assert built(strategy="ddp").train().update == 1


@pytest.mark.parametrize(("ranks", "strategy"), [(2, FAST), (2, Single), (4, Ddp)])
def test_a_whole_model_that_a_part_of_the_ranks_shares_is_refused(on_ranks: Any, ranks: int, strategy: Any) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        models = [line(), PipelineModel(layers())] if ranks == 2 else [line()]  # the latter: all stages on each rank
        for model in models:
            with pytest.raises(ArgumentError):
                built(model, strategy=strategy(mesh.data))

    on_ranks(ranks, act)


def test_a_strategy_over_other_ranks_than_those_of_the_same_stages_is_refused(on_ranks: Any) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        crossed = group.split([[0, 3], [2, 1]])  # each rank has the number that it has in `mesh.data`
        for other in (mesh.pipeline, crossed, mesh.world, Group()):
            with pytest.raises(ArgumentError):
                built(PipelineModel(layers(), mesh=mesh), strategy=FAST(other))
        same = Mesh.of(group, pipeline=2).data
        assert built(PipelineModel(layers(), mesh=mesh), strategy=FAST(same)).train().update == 1

    on_ranks(4, act)


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"])
def test_a_model_that_torch_shares_already_is_refused(kind: str) -> None:
    wrapped = type(kind, (nn.Module,), {"__module__": "torch.somewhere"})()
    wrapped.module = nn.Linear(4, 1)
    for model in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(ArgumentError):
            check_model(model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_strategy_by_name_is_that_of_the_replicas_of_a_model_in_stages(on_ranks: Any, ranks: int) -> None:
    def norms(strategy: Any) -> list[float]:
        def act(group: Any) -> float:
            mesh = Mesh.of(group, pipeline=2)
            model = PipelineModel(layers(), mesh=mesh)
            return built(model, strategy=strategy(mesh)).train().metrics["train/grad_norm"]

        return on_ranks(ranks, act)

    assert norms(lambda mesh: "ddp") == norms(lambda mesh: "auto") == norms(lambda mesh: FAST(mesh.data))


MOST = 8
OWN = str(Path(evenstep.__file__).parent)


class Seen(nn.Linear):
    """Notes the frames that called its forward in training."""

    frames: list[str] = []  # noqa: RUF012

    def forward(self, input: Tensor) -> Tensor:
        if self.training and not self.frames:
            frame: Any = sys._getframe()
            while frame is not None:
                if frame.f_code.co_filename.startswith(OWN):
                    self.frames.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_qualname}")
                frame = frame.f_back
        return super().forward(input)


def test_frames_from_train_to_forward() -> None:
    trainer_of(Seen(3, 1), updates=1, train=Training(check_loss=False)).train()
    assert Seen.frames[-1] == "trainer:Trainer.train"
    assert len(Seen.frames) <= MOST, "\n".join(Seen.frames)


@pytest.mark.parametrize("make", [trainer_of, engine_of])
def test_trainer_and_engine_have_few_public_members(make: Any) -> None:
    members = [name for name in dir(make()) if not name.startswith("_")]
    assert len(members) <= 20, members
