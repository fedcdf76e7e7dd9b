"""What is refused when a trainer is built: launched but not told so, shared by something else, nothing to train."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import MapData, Task, Trainer
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Group, Mesh, Single
from evenstep.pipeline import PipelineModel
from evenstep.train.checks import check_model
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


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.sum(-1) - batch[1]) ** 2).sum()


def trainer(model: nn.Module, **more: Any) -> Trainer:
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1),
        data=MapData([(torch.ones(4), torch.tensor(1.0))] * 4, global_batch_size=4, micro_batch_size=1),
        updates=1,
        device="cpu",
        **more,
    )


def layers_of_a_generator() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    generator = torch.Generator().manual_seed(0)  # torch's own is shared by the threads
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


@pytest.mark.parametrize("environ", [LAUNCHED, IN_SLURM])
def test_two_processes_without_a_strategy_are_refused_when_built(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with refused(ArgumentError, "strategy"):
        trainer(nn.Linear(4, 1))
    trainer(nn.Linear(4, 1), strategy=Single()).train()  # as the error says, for runs of their own


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(2, partial(Ddp, reduction="fast")), (2, Single), (4, partial(Ddp, reduction="fast")), (4, Ddp)],
)
def test_a_whole_model_that_a_part_of_the_ranks_shares_is_refused_when_built(
    on_ranks: Any, ranks: int, strategy: Any
) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        (f"is for {ranks // 2} of the run's {ranks} ranks, and Linear is not in stages .*, so they would train apart")
        with pytest.raises(ArgumentError):
            trainer(nn.Linear(4, 1), strategy=strategy(mesh.data))
        if ranks == 2:  # and so is one whose stages are all on each rank, as the mesh was left out
            with pytest.raises(ArgumentError):
                trainer(PipelineModel(layers_of_a_generator()), strategy=strategy(mesh.data))

    on_ranks(ranks, act)


def test_a_strategy_over_other_ranks_than_those_of_the_same_stages_is_refused_when_built(on_ranks: Any) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        crossed = group.split([[0, 3], [2, 1]])  # each rank has the number that it has in `mesh.data`
        for other in (mesh.pipeline, crossed):
            model = PipelineModel(layers_of_a_generator(), mesh=mesh)
            with pytest.raises(ArgumentError):
                trainer(model, strategy=Ddp(other, reduction="fast"))
        model = PipelineModel(layers_of_a_generator(), mesh=mesh)
        with pytest.raises(ArgumentError):
            trainer(model, strategy=Ddp(mesh.world, reduction="fast"))
        trainer(
            PipelineModel(layers_of_a_generator(), mesh=mesh),
            strategy=Ddp(Mesh.of(group, pipeline=2).data, reduction="fast"),
        ).train()

    on_ranks(4, act)


MAY_GO = {"TORCHFT_LIGHTHOUSE": "http://a:1", "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"}


@pytest.mark.parametrize(
    "strategy", [None, "auto", "ddp", "fsdp", "zero1", "single", Ddp(), Ddp(Group(), reduction="fast")]
)
def test_a_strategy_that_does_not_know_of_ranks_that_come_and_go_is_refused_when_built(
    monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    for name, value in MAY_GO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError):
        trainer(nn.Linear(4, 1), strategy=strategy)
    assert trainer(nn.Linear(4, 1), strategy=Single()).train().update == 1  # as the error says
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "1")
    assert trainer(nn.Linear(4, 1), strategy="ddp").train().update == 1


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"])
def test_a_model_that_torch_shares_already_is_refused_by_name(kind: str) -> None:
    wrapper = type(kind, (nn.Module,), {"__module__": "torch.somewhere"})
    wrapped = wrapper()
    wrapped.module = nn.Linear(4, 1)
    for model, _where in ((wrapped, "the model is"), (nn.Sequential(wrapped), "its part `0` is")):
        with pytest.raises(ArgumentError):
            check_model(model)


def test_a_pipeline_rank_whose_layers_are_frozen_or_without_parameters_trains(on_ranks: Any) -> None:
    def layers(kind: str) -> list[nn.Module]:
        made: list[nn.Module] = [nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Linear(4, 1)]
        generator = torch.Generator().manual_seed(0)  # torch's own is shared by the threads
        with torch.no_grad():
            for parameter in nn.ModuleList(made).parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if kind == "frozen":
            made[0].requires_grad_(False)
        if kind == "frozen end":
            made[2].requires_grad_(False)
            made[3].requires_grad_(False)
        return [nn.Tanh(), *made[1:]] if kind == "no parameters" else made

    def act(group: Any, kind: str) -> dict[str, Tensor]:
        mesh = Mesh.of(group, pipeline=2)
        one = trainer(PipelineModel(layers(kind), mesh=mesh), strategy=Single(mesh.data))
        one.train()
        return one.state_dict()["model"]

    for kind in ("frozen", "frozen end", "no parameters"):
        alone = trainer(PipelineModel(layers(kind)), strategy=Single())
        alone.train()
        wanted, got = alone.state_dict()["model"], on_ranks(2, lambda group, kind=kind: act(group, kind))[0]
        assert list(wanted) == list(got)
        assert all(wanted[name].shape == got[name].shape for name in wanted)  # threads share what dropout draws from


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_strategy_that_is_named_is_that_of_the_replicas_of_a_model_in_stages(
    on_ranks: Callable[..., list[Any]], ranks: int
) -> None:
    def norms(strategy: Callable[[Mesh], Any]) -> list[float]:
        def act(group: Any) -> float:
            mesh = Mesh.of(group, pipeline=2)
            model = PipelineModel([nn.Linear(4, 3), nn.Linear(3, 1)], mesh=mesh)
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.1)
            return trainer(model, strategy=strategy(mesh)).train().metrics["train/grad_norm"]

        return on_ranks(ranks, act)

    assert (
        norms(lambda mesh: "ddp") == norms(lambda mesh: "auto") == norms(lambda mesh: Ddp(mesh.data, reduction="fast"))
    )
