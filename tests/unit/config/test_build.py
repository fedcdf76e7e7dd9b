from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.config.build import RunParts, build_parts
from evenstep.config.load import from_arguments, open_run
from evenstep.data import MapData, StreamData
from evenstep.errors import ConfigError, TaskError
from refused import refused

PARTS = """
import torch
from torch import nn
from evenstep import Task

def model(width: int = 2):
    return nn.Linear(width, 1)

def embedding():
    return nn.Embedding(4, 1, sparse=True)

def strided():
    model = nn.Linear(2, 1)
    model.weight = nn.Parameter(torch.randn(2, 2)[:, :1].T)
    return model

class Mine(Task):
    def loss(self, output, batch):
        return output.sum()

class Centers(Mine):
    def __init__(self):
        self.centers = nn.Embedding(4, 1)

def samples():
    return [*range(4)]

class Stream:
    def __iter__(self): return iter(range(4))
    def state_dict(self): return {}
    def load_state_dict(self, state): ...

def by_model(model, *, lr: float):
    return torch.optim.SGD([{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": 2 * lr}])

def no_optimizer(model, *, lr: float):
    return lr
"""
RUN = """
name = "built"
device = "cpu"
model = { target = "parts.py:model" }
task = { target = "parts.py:Mine" }
data = { global_batch_size = 2, train = { target = "parts.py:samples" } }
train = { updates = 1 }
optimizer = { name = "SGD", lr = 0.1 }
"""
Build = Callable[..., RunParts]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "parts.py").write_text(PARTS)

    def run(*settings: str) -> RunParts:
        with open_run(tmp_path / "run.toml", from_arguments(settings)) as opened:
            return build_parts(opened.config)

    return run


def test_the_same_seed_gives_the_same_model_and_leaves_the_generators_alone(build: Build) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = build(), build(), build("--seed", "1")
    assert torch.equal(torch.get_rng_state(), before)
    weights: list[Any] = [parts.model.weight for parts in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.manual_seed(42)
    assert torch.equal(weights[0], torch.nn.Linear(2, 1).weight)


@pytest.mark.parametrize(
    ("settings", "fused"),
    [
        ([], True),
        (["--optimizer.args.fused", "false"], False),
        (["--model.target", "parts.py:embedding", "--optimizer.name", "SGD"], None),
        (["--model.target", "parts.py:strided"], None),
        (["--optimizer.name", "SGD", "--parallel.strategy", "fsdp"], None),  # torch has no such kernel for shards
        (["--optimizer.name", "AdamW", "--parallel.strategy", "fsdp", "--parallel.reduction", "fast"], True),
    ],
)
def test_an_optimizer_is_fused_where_it_can_be(build: Build, settings: list[str], fused: bool | None) -> None:
    assert build(*settings).optimizer.param_groups[0].get("fused") is fused


def test_a_function_makes_the_optimizer_from_the_model(build: Build) -> None:
    own = ["--optimizer.name", "none", "--optimizer.target"]
    assert [group["lr"] for group in build(*own, "parts.py:by_model").optimizer.param_groups] == [0.1, 0.2]
    with refused(TaskError, "optimizer"):
        build(*own, "parts.py:no_optimizer")


def test_a_dataset_without_a_length_is_a_stream(build: Build) -> None:
    assert isinstance(build().data, MapData)
    assert isinstance(build("--data.train.target", "parts.py:Stream").data, StreamData)
    with pytest.raises(ConfigError):
        build("--data.train.target", "parts.py:Stream", "--data.packed", "true", "--data.micro_batch_tokens", "3")


def test_parameters_of_a_task_are_a_group_of_their_own_and_named_by_patterns(build: Build) -> None:
    parts = build("--task.target", "parts.py:Centers")
    task: Any = parts.task
    own, of_task = (group["params"] for group in parts.optimizer.param_groups)
    assert (len(own), of_task) == (2, [task.centers.weight])
    group = ["--optimizer.groups.task.patterns", '["task_parameters.*"]', "--optimizer.groups.task.lr_factor", "3.0"]
    (others, task_group) = build("--task.target", "parts.py:Centers", *group).optimizer.param_groups
    assert (len(others["params"]), len(task_group["params"]), task_group["lr"]) == (2, 1, pytest.approx(0.3))
    trainer = build("--task.target", "parts.py:Centers").trainer()
    assert "task_parameters.centers.weight" in dict(trainer.model.named_parameters())
