"""A model in stages on several ranks, as threads, against the same on one process: the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Failures, MapData, Mixture, Reading, Task, Trainer, Training
from evenstep.contrib.multitask import PcGrad, Scheduled, Uncertainty
from evenstep.data import RoundRobin
from evenstep.errors import ArgumentError, EvenstepError, ReplicaError
from evenstep.events import Hook, UpdateEvent
from evenstep.optim.schedules import Constant
from evenstep.parallel import Ddp, Group, Mesh, Single, Strategy, Zero1
from evenstep.pipeline import SCHEDULES, Layer, Layers, Layout, Op, PipelineModel, Plan
from evenstep.precision import Fp16Mixed
from refused import refused

OnRanks = Callable[..., list[Any]]
State = dict[str, Any]


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def points(count: int = 22, width: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(width, generator=generator), torch.tensor(float(n % 3))) for n in range(count)]


def deep(layers: int = 12) -> Layers:
    """Builders, which are seeded by place, but torch's generator is shared by threads: filled from one's own."""

    def filled(place: int) -> nn.Module:
        if place % 2:
            return nn.Tanh()
        linear = nn.Linear(3, 1 if place == layers else 3)
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return linear

    return Layers.of([lambda place=place: filled(place) for place in range(layers + 1)])


def trained(model: PipelineModel, strategy: Any, **more: Any) -> tuple[Trainer, State]:
    given: dict[str, Any] = {
        "model": model,
        "task": Square(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        "data": MapData(points(), global_batch_size=10, micro_batch_size=2),
        "updates": 5,
        "device": "cpu",
        "strategy": strategy,
        "train": Training(clip_norm=0.5),
    }
    trainer = Trainer(**(given | more))
    trainer.train()
    return trainer, trainer.state_dict()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    return left == right


def check_same(mine: State, other: State) -> None:
    for part in ("model", "ema", "precision", "progress"):
        assert same(mine[part], other[part]), part
    assert same(mine["optimizer"]["state"], other["optimizer"]["state"])
    groups = [[group["parameters"] for group in state["optimizer"]["groups"]] for state in (mine, other)]
    assert groups[0] == groups[1]


@pytest.fixture(scope="module")
def alone() -> State:
    return trained(PipelineModel(deep()), Ddp(), train=Training(clip_norm=0.5, ema=Ema(decay=0.9)))[1]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_pipeline_schedule_ends_at_the_bits_of_one_process(
    on_ranks: OnRanks, alone: State, schedule: str, ranks: int
) -> None:
    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=ranks)
        model = PipelineModel(deep(), mesh=mesh, schedule=schedule)
        return trained(model, Ddp(mesh.data), train=Training(clip_norm=0.5, ema=Ema(decay=0.9)))[1]

    check_same(on_ranks(ranks, act)[0], alone)


def zero1(group: Group) -> Strategy:
    return Zero1(group)


def zero1_fast(group: Group) -> Strategy:
    return Zero1(group, reduction="fast")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
@pytest.mark.parametrize("strategy", [Ddp, partial(Ddp, reduction="fast"), zero1, zero1_fast])
def test_replicas_of_pipelines_train_what_one_process_does(
    on_ranks: OnRanks, alone: State, schedule: str, strategy: Any
) -> None:
    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=2)
        model = PipelineModel(deep(), mesh=mesh, schedule=schedule)
        return trained(model, strategy(mesh.data), train=Training(clip_norm=0.5, ema=Ema(decay=0.9)))[1]

    state = on_ranks(6, act)[0]  # three replicas for five micro-batches, two in the short last batch
    if strategy in (Ddp, zero1):
        check_same(state, alone)
    for name, value in alone["model"].items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-5, atol=1e-6)


class Memory(nn.Module):
    """Gives a tree: values, a mask, and something that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.linear(x).tanh()
        return {"all": (hidden, hidden * 2), "mask": x > 0, "extra": hidden.sum() if len(x) > 3 else None, "n": len(x)}


class Reader(nn.Module):
    """Reads the memory, and the batch once more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, memory: dict[str, Any], again: Tensor) -> Tensor:
        assert memory["n"] == len(x)
        assert memory["mask"].dtype == torch.bool
        read = self.linear(memory["all"][0]).masked_fill(memory["mask"], 0.0) + again
        return x + read if memory["extra"] is None else x + read * memory["extra"]


def branched() -> Layers:
    def fixed(module: nn.Module, seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return module

    return Layers(
        (
            Layer("memory", fixed(Memory(), 1), inputs=("x",)),
            Layer("start", fixed(nn.Linear(3, 3), 2), sources=(), inputs=("input",)),
            Layer("reader.0", fixed(Reader(), 3), sources=("start", "memory"), inputs=("again",)),
            Layer("reader.1", fixed(Reader(), 4), sources=("reader.0", "memory"), inputs=("again",)),
            Layer("end", fixed(nn.Linear(3, 1), 5)),
        )
    )


class Branched(Square):
    def inputs(self, batch: Any) -> Any:
        return {"x": batch[0], "input": batch[0] + 1, "again": batch[0] * 2}


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (5, "1f1b"), (2, "zb_h1"), (2, "interleaved")])
def test_trees_masks_missing_tensors_and_skip_edges_cross_stages(on_ranks: OnRanks, ranks: int, schedule: str) -> None:
    # 10 = 4 + 4 + 2: shapes change with the micro-batch, and "extra" is missing in one, which is another loss
    more: dict[str, Any] = {"task": Branched(), "data": MapData(points(), global_batch_size=10, micro_batch_size=4)}
    more["train"] = Training(clip_norm=0.5, check_loss=False)

    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=ranks)
        return trained(PipelineModel(branched(), mesh=mesh, schedule=schedule), Ddp(mesh.data), **more)[1]

    check_same(on_ranks(ranks, act)[0], trained(PipelineModel(branched()), Ddp(), **more)[1])


def tied() -> Layers:
    layers = deep().layers
    return Layers(layers, ties=(("0.weight", "4.weight", "10.weight"),))


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (3, "zb_v"), (2, "interleaved")])
def test_tied_parameters_stay_equal_wherever_their_owners_are(on_ranks: OnRanks, ranks: int, schedule: str) -> None:
    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=ranks)
        model = PipelineModel(tied(), mesh=mesh, schedule=schedule)
        return trained(model, Ddp(mesh.data), train=Training(clip_norm=0.5, ema=Ema(decay=0.9)))[1]

    state = on_ranks(ranks, act)[0]
    check_same(state, trained(PipelineModel(tied()), Ddp(), train=Training(clip_norm=0.5, ema=Ema(decay=0.9)))[1])
    assert torch.equal(state["model"]["0.weight"], state["model"]["10.weight"])
    assert "10.weight" not in state["optimizer"]["state"]


def test_an_overflow_in_one_stage_is_answered_by_all(on_ranks: OnRanks) -> None:
    def more() -> dict[str, Any]:
        return {"precision": Fp16Mixed(initial=2.0**22), "updates": 3, "train": Training()}

    def act(group: Any) -> tuple[Any, State]:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(deep(4), mesh=mesh), Single(mesh.data), **more())[1]

    first, second = on_ranks(2, act)
    wanted = trained(PipelineModel(deep(4)), Single(), **more())[1]
    assert wanted["precision"]["scale"] < 2.0**22  # there was an overflow
    assert first["precision"] == second["precision"] == wanted["precision"]
    check_same(first, wanted)


def test_metrics_and_evaluations_are_known_on_all_ranks(on_ranks: OnRanks) -> None:
    def more() -> dict[str, Any]:
        data = MapData(points(7), global_batch_size=7, micro_batch_size=2, shuffle=False)
        return {"evaluations": {"valid": data}, "train": Training(clip_norm=0.5, ema=Ema(decay=0.5))}

    def act(group: Any) -> dict[str, float]:
        mesh = Mesh.of(group, pipeline=2)
        trainer, _ = trained(PipelineModel(deep(), mesh=mesh, schedule="interleaved"), Single(mesh.data), **more())
        return {name: trainer.storage.history(name)[-1].value for name in trainer.storage.names()}

    trainer, _ = trained(PipelineModel(deep()), Single(), **more())
    wanted = {name: trainer.storage.history(name)[-1].value for name in trainer.storage.names()}
    assert {"train/loss", "valid/loss", "train/grad_norm", "train/lr"} <= wanted.keys()
    assert on_ranks(2, act) == [wanted, wanted]


class Listed(Square):
    """Of samples in a list, of which ranks without the first stage need no inputs."""

    def inputs(self, batch: Any) -> Tensor:
        return torch.stack([x for x, _ in batch])

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, (None, torch.stack([y for _, y in batch])))


class Late(Square):
    late_weight = True

    def loss(self, output: Any, batch: Any) -> Any:
        from evenstep import Loss

        return Loss(((output.squeeze(-1) - batch[1]) ** 2).sum(), weight=(batch[1] > 0).sum())


def test_a_weight_that_only_the_last_stage_knows_divides_on_all(on_ranks: OnRanks) -> None:
    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(deep(), mesh=mesh), Ddp(mesh.data), task=Late())[1]

    check_same(on_ranks(4, act)[0], trained(PipelineModel(deep()), Ddp(), task=Late())[1])


LAYOUTS: list[tuple[int, str]] = [(2, "1f1b"), (3, "interleaved"), (1, "sequential"), (2, "zb_v")]


def test_a_run_goes_on_with_other_stages_on_other_ranks(on_ranks: OnRanks) -> None:
    state: State = {}
    for place, (ranks, schedule) in enumerate(LAYOUTS):

        def act(group: Any, where: Any = (ranks, schedule, 2 * place + 2), begin: State = state) -> State:
            ranks, schedule, end = where
            mesh = Mesh.of(group, pipeline=ranks)
            model = PipelineModel(tied(), mesh=mesh, schedule=schedule)
            trainer = Trainer(
                model=model,
                task=Square(),
                optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
                data=MapData(points(), global_batch_size=10, micro_batch_size=2),
                updates=end,
                device="cpu",
                strategy=Ddp(mesh.data),
                train=Training(ema=Ema(decay=0.9)),
            )
            if begin:
                trainer.load_state_dict(begin)
            trainer.train()
            return trainer.state_dict()

        state = on_ranks(ranks, act)[0]
    check_same(state, trained(PipelineModel(tied()), Ddp(), updates=8, train=Training(ema=Ema(decay=0.9)))[1])


class Failing(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self.rows:
            raise ValueError("no such thing")
        return x


@pytest.mark.parametrize("place", [0, 4])
def test_an_error_in_one_stage_wakes_the_others_with_rank_action_and_micro_batch(on_ranks: OnRanks, place: int) -> None:
    def act(group: Any) -> str:
        mesh = Mesh.of(group, pipeline=2)
        layers: list[Any] = [layer.build for layer in deep(4).layers]
        layers.insert(place, Failing(rows=1))
        data = MapData(points(5), global_batch_size=5, micro_batch_size=2)  # the third micro-batch has one row
        with pytest.raises((ValueError, EvenstepError)) as raised:
            trained(
                PipelineModel(layers, mesh=mesh),
                Single(mesh.data),
                data=data,
                train=Training(clip_norm=0.5, check_loss=False),
            )
        return "\n".join([str(raised.value), *raised.value.__notes__])

    said = on_ranks(2, act)
    failed = 0 if place == 0 else 1
    assert said[failed].startswith("no such thing\n")
    stopped = f"pipeline rank {failed} of 2 stopped at action {failed}F2 (forward, stage {failed}, micro-batch 2)"
    assert stopped in said[failed]
    assert f"{stopped}: ValueError: no such thing" in said[1 - failed]


def test_pipeline_ranks_with_different_batches_are_refused_but_a_skipped_sample_is_not(
    on_ranks: OnRanks,
) -> None:
    def act(group: Any, *, unlike: bool) -> State:
        mesh = Mesh.of(group, pipeline=2)
        read = [(x + group.rank * unlike, y) if group.rank == 0 or unlike else (None, y) for x, y in points()]
        data = MapData(read, global_batch_size=10, micro_batch_size=2, collate=list)
        return trained(PipelineModel(deep(4), mesh=mesh), Single(mesh.data), data=data, task=Listed())[1]

    with refused(ReplicaError, "data"):
        on_ranks(2, lambda group: act(group, unlike=True))
    check_same(on_ranks(2, lambda group: act(group, unlike=False))[0], trained(PipelineModel(deep(4)), Single())[1])


class Unread:
    """Samples, one of which one rank can't read."""

    def __init__(self, sample: int) -> None:
        self.points, self.sample = points(), sample

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, number: int) -> Any:
        if number == self.sample:
            raise OSError("gone")
        return self.points[number]


def test_a_sample_unreadable_on_one_pipeline_rank_is_skipped_by_all_or_ends_the_run(
    on_ranks: OnRanks,
) -> None:
    def data(sample: int) -> MapData:
        reading = Reading(skip_failing=True, retries=0)
        return MapData(Unread(sample), global_batch_size=5, micro_batch_size=5, shuffle=False, reading=reading)

    def act(group: Any, sample: int) -> State:
        mesh = Mesh.of(group, pipeline=2)
        model = PipelineModel(deep(4), mesh=mesh)
        return trained(model, Single(mesh.data), data=data(sample), failures=Failures(max_skipped_samples=9))[1]

    with refused(ReplicaError, "weight"):
        on_ranks(2, lambda group: act(group, sample=7 if group.rank else -1))
    state = on_ranks(2, lambda group: act(group, sample=7))[0]
    more: State = {"data": data(7), "failures": Failures(max_skipped_samples=9)}
    check_same(state, trained(PipelineModel(deep(4)), Single(), **more)[1])


def test_a_strategy_that_is_not_for_these_ranks_is_refused(on_ranks: OnRanks) -> None:
    def act(group: Any) -> None:
        mesh = Mesh.of(group, pipeline=2)
        with pytest.raises(ArgumentError):
            trained(PipelineModel(deep(), mesh=mesh), Single())

    on_ranks(4, act)


@pytest.mark.parametrize("kind", ["stages", "stages, half backwards", "whole"])
def test_an_update_that_raised_leaves_nothing_behind(kind: str) -> None:
    class Once(Hook):
        left = 1

        def before_backward(self, event: Any) -> None:
            if (event.update, event.microbatch) == (2, 3) and self.left:
                self.left = 0
                raise RuntimeError("once")

    def model() -> Any:
        if kind == "whole":
            return nn.Sequential(*(layer.build() for layer in deep().layers))  # type: ignore[operator]
        staged = PipelineModel(deep(), stages_per_rank=3)
        if "half" in kind:
            staged.schedule = replace(SCHEDULES["zb_v"], order=halves)
        return staged

    wanted = trained(model(), Ddp())[1]
    again = model()
    trainer = Trainer(
        model=again,
        task=Square(),
        optimizer=torch.optim.AdamW(again.parameters(), lr=0.01, fused=True),
        data=MapData(points(), global_batch_size=10, micro_batch_size=2),
        updates=5,
        device="cpu",
        strategy=Ddp(),
        train=Training(clip_norm=0.5),
        hooks=[Once()],
    )
    with pytest.raises(RuntimeError, match="once"):
        trainer.train()
    trainer.train()
    check_same(trainer.state_dict(), wanted)


def halves(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """The sequential order, each backward in two halves."""
    split = {Op.BACKWARD: (Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)}
    return tuple(
        tuple(replace(action, op=op) for action in plan for op in split.get(action.op, (action.op,)))
        for plan in SCHEDULES["sequential"].order(layout, microbatches)
    )


def test_hooks_are_called_once_for_each_micro_batch_on_each_rank(on_ranks: OnRanks) -> None:
    class Count(Hook):
        def __init__(self) -> None:
            self.said: list[str] = []

        def before_microbatch(self, event: Any) -> None:
            self.said.append(f"+{event.microbatch}")

        def after_microbatch(self, event: Any) -> None:
            self.said.append(f"-{event.microbatch}{'' if event.loss is None else ' loss'}")

        def after_update(self, event: UpdateEvent) -> None:
            self.trainer.request_stop("one is enough")

    def act(group: Any) -> list[str]:
        mesh, count = Mesh.of(group, pipeline=2), Count()
        data = MapData(points(4), global_batch_size=4, micro_batch_size=2)
        trained(PipelineModel(deep(), mesh=mesh), Single(mesh.data), data=data, hooks=[count])
        return count.said

    assert on_ranks(2, act) == [["+0", "+1", "-0", "-1"], ["+0", "-0 loss", "+1", "-1 loss"]]


def test_what_waits_on_a_rank_does_not_grow_with_the_number_of_micro_batches(on_ranks: OnRanks) -> None:
    def most(microbatches: int) -> Sequence[int]:
        def act(group: Any) -> int:
            mesh = Mesh.of(group, pipeline=2)
            alive: set[int] = set()
            peak = 0

            class Watched(nn.Module):
                def forward(self, x: Tensor) -> Tensor:
                    nonlocal peak
                    gone = torch.autograd.graph.get_gradient_edge(x).node
                    alive.add(id(gone))
                    y = x * 1
                    y.register_hook(lambda _: alive.discard(id(gone)))
                    peak = max(peak, len(alive))
                    return y

            layers: list[Any] = [layer.build for layer in deep(4).layers]
            model = PipelineModel([layers[0], Watched(), *layers[1:]], mesh=mesh)
            data = MapData(points(microbatches), global_batch_size=microbatches, micro_batch_size=1)
            trained(model, Single(mesh.data), data=data, updates=2)
            return peak

        return on_ranks(2, act)

    assert most(16) == most(4) == [2, 0]


class Several(nn.Module):
    """The last stage: a head for each task, of which all are run."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(9)
        self.heads = nn.ModuleDict({name: nn.Linear(3, 1) for name in "abc"})
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: head(x) for name, head in self.heads.items()}


class OfHead(Square):
    """Trains one head; without a loss where a batch's last target is `silent`."""

    def __init__(self, head: str, silent: float) -> None:
        self.head, self.silent = head, silent

    def loss(self, output: Any, batch: Any) -> Any:
        return None if float(batch[1][-1]) == self.silent else super().loss(output[self.head], batch)


def with_heads() -> list[nn.Module]:
    trunk: list[nn.Module] = [layer.build() for layer in deep(4).layers[:4]]  # type: ignore[operator]
    return [*trunk[:3], nn.BatchNorm1d(3), *trunk[3:], Several()]


def several(model: Any, strategy: Any, *, silent: float = -1.0, **more: Any) -> State:
    sizes = {"a": 8, "b": 6, "c": 4}
    sets = {name: MapData(points(), global_batch_size=size, micro_batch_size=2) for name, size in sizes.items()}
    given: dict[str, Any] = {
        "task": {name: OfHead(name, silent) for name in sizes},
        "data": Mixture(sets, mixing=more.pop("mixing", None)),
        "evaluations": {"valid": Mixture(sets, end="max")},
    }
    trainer, state = trained(model, strategy, **(given | more))
    return state | {"valid": {name: value for name, value in trainer.evaluate()["valid"].items() if "loss" in name}}


SEVERAL: dict[str, Callable[[], State]] = {
    "all in each update": dict,
    "one in each update": lambda: {"mixing": RoundRobin()},
    "some batches without a loss": lambda: {"silent": 1.0},
    "some updates without any loss": lambda: {"silent": 1.0, "mixing": RoundRobin()},
    "numbers as coefficients": lambda: {"train": Training(clip_norm=0.5, coefficients={"a": 0.5, "c": 3.0})},
    "scheduled coefficients": lambda: {
        "train": Training(clip_norm=0.5, coefficients=Scheduled({"b": Constant(warmup_updates=3)}))
    },
    "frozen statistics": lambda: {"train": Training(clip_norm=0.5, norm_statistics="frozen")},
}


@pytest.mark.parametrize("case", list(SEVERAL))
def test_several_tasks_in_stages_train_what_the_model_whole_does(on_ranks: OnRanks, case: str) -> None:
    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=2)
        return several(PipelineModel(with_heads(), mesh=mesh), Ddp(mesh.data), **SEVERAL[case]())

    state = on_ranks(2, act)[0]
    wanted = several(nn.Sequential(*with_heads()), Ddp(), **SEVERAL[case]())
    check_same(state, wanted)
    assert state["valid"] == wanted["valid"]


def test_heads_that_no_update_uses_stay_as_they_are_on_all_stages(on_ranks: OnRanks) -> None:
    begin = Several()

    def act(group: Any) -> State:
        mesh = Mesh.of(group, pipeline=2)
        data = Mixture({"a": MapData(points(), global_batch_size=8, micro_batch_size=2)})
        tasks = {name: OfHead(name, -1.0) for name in "ab"}
        return trained(PipelineModel(with_heads(), mesh=mesh), Ddp(mesh.data), task=tasks, data=data)[1]

    state = on_ranks(4, act)[0]
    moved = {name for name, value in begin.state_dict().items() if not torch.equal(value, state["model"][f"5.{name}"])}
    assert moved == {"heads.a.weight", "heads.a.bias"}
    assert [name for name in state["optimizer"]["state"] if "heads" in name] == ["5.heads.a.weight", "5.heads.a.bias"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"train": Training(clip_norm=0.5, coefficients=Uncertainty())},
            "learned coefficients would need the whole model",
        ),
        ({"train": Training(clip_norm=0.5, combine=PcGrad())}, "`combine` would need"),
        ({"task": {"a": Late(), "b": Square(), "c": Square()}}, "task `a` has `late_weight`.* Let `weight` count it"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused_for_stages(more: State, said: str) -> None:
    with pytest.raises(ArgumentError):
        several(PipelineModel(with_heads()), Ddp(), **more)
