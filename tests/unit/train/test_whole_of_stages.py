"""Whole models out of stages: tasks that evaluate by themselves, and tasks that ask the average, as on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Logging, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import ArgumentError, OutOfMemoryError, TaskError
from evenstep.parallel import Ddp, Group, Mesh, Ordered, Zero1
from evenstep.pipeline import Layer, PipelineModel, whole_model
from evenstep.pipeline.whole_model import WholeModel
from evenstep.pipeline.wire import Wire
from evenstep.precision import Float8Mixed

OnRanks = Callable[..., list[Any]]
WORDS, WIDTH, LENGTH = 7, 4, 5


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, source: Tensor) -> Tensor:
        return self.norm(self.words(source).mean(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + read[:, None])


class Words(nn.Embedding):
    def forward(self, target: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(target)


class Score(nn.Module):
    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.weight = words.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Writer(nn.Module):
    """Reads a text and writes another: an encoder, and a decoder whose scores are tied to its words."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.reader, self.words = Reader(), Words(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.score = Score(self.words)
        self.double()
        generator = torch.Generator().manual_seed(1)  # of its own: ranks that are threads share torch's
        with torch.no_grad():
            for one in self.parameters():
                one.uniform_(-1, 1, generator=generator)

    def layers(self) -> list[Layer]:
        blocks = [
            Layer(f"blocks.{n}", one, sources=(f"blocks.{n - 1}" if n else "words", "reader"))
            for n, one in enumerate(self.blocks)
        ]
        first = Layer("reader", self.reader, inputs=("source",)), Layer("words", self.words, (), ("target",))
        return [*first, *blocks, Layer("score", self.score)]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.after(target, self.reader(source))

    def after(self, target: Tensor, read: Tensor) -> Tensor:
        x = self.words(target)
        for block in self.blocks:
            x = block(x, read)
        return self.score(x)

    def write(self, source: Tensor) -> Tensor:
        read, text = self.reader(source), source[:, :1]
        for _ in range(LENGTH):
            text = torch.cat([text, self.after(text, read)[:, -1:].argmax(-1)], 1)
        return text


class Write(Task):
    def inputs(self, batch: Any) -> Any:
        return {"source": batch["source"], "target": batch["target"]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["source"].flatten(), reduction="sum")

    def evaluate(self, model: Any, batch: Any) -> Loss:
        assert type(model) is Writer and not model.training and not self.now.is_training
        texts = model.write(batch["source"])
        scores: Any = Task.evaluate(self, model, batch)
        return Loss(scores, metrics={"written": (texts.sum(), texts.numel()), "calls": (1.0, 1.0)})


class Taught(Write):
    """Learns from what the average gives, of another input than the model's."""

    uses_average = True

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        taught = self.now.teacher({"source": batch["source"], "target": batch["target"].flip(1)})
        assert not taught.requires_grad
        return super().loss(output, batch) + ((output - taught) ** 2).sum()


def texts(count: int = 14) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {name: torch.randint(WORDS, (LENGTH,), generator=generator) for name in ("source", "target")}
        for _ in range(count)
    ]


def trainer_of(model: nn.Module, strategy: Any = None, task: Task | None = None, **more: Any) -> Trainer:
    more.setdefault("evaluations", MapData(texts(7), global_batch_size=5, micro_batch_size=1, shuffle=False))
    more.setdefault("train", Training(ema=Ema(decay=0.6, evaluated="both"), clip_norm=1.0))
    return Trainer(
        model=model,
        task=task or Write(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        data=MapData(texts(), global_batch_size=8, micro_batch_size=2),
        updates=more.pop("updates", 4),
        device="cpu",
        strategy=strategy,
        log=Logging(writers=()),
        **more,
    )


def staged(
    group: Any, schedule: str, pipeline: int, strategy: Any = Ordered, task: Any = Write, **more: Any
) -> Trainer:
    mesh = Mesh.of(group, pipeline=pipeline)
    model = PipelineModel(Writer(), mesh=mesh, schedule=schedule)
    return trainer_of(model, strategy(mesh.data), task(), **more)


def alone(task: Any = Write, **more: Any) -> Trainer:
    return trainer_of(PipelineModel(Writer()), Ordered(), task(), **more)


def valid(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("valid/")}


def same(left: Any, right: Any) -> bool:
    return all(
        left[part].keys() == right[part].keys()
        and all(torch.equal(left[part][name], right[part][name]) for name in left[part])
        for part in ("model", "ema")
    )


def by_hand(state: Any) -> float:
    """What a plain model writes, of all texts at once."""
    model = Writer()
    model.load_state_dict(state | {"score.weight": state["words.weight"]})
    wrote = model.eval().write(torch.stack([one["source"] for one in texts(7)]))
    return float(wrote.sum()) / wrote.numel()


CUTS = [("1f1b", 2), ("1f1b", 3), ("interleaved", 2), ("zb_v", 3)]


@pytest.mark.parametrize(("schedule", "ranks"), CUTS)
def test_what_is_written_in_stages_is_what_a_plain_model_writes(on_ranks: OnRanks, schedule: str, ranks: int) -> None:
    def act(group: Any) -> Any:
        trainer = staged(group, schedule, ranks)
        return trainer.train().metrics, trainer.state_dict(), trainer.storage.history("valid/calls")

    wanted, (_, whole, _) = alone().train().metrics, (found := on_ranks(ranks, act))[0]
    for metrics, _, calls in found:
        assert valid(metrics).keys() == valid(wanted).keys() and calls[-1].weight == 7, "each text once"
        assert metrics["valid/written"] == wanted["valid/written"] == by_hand(whole["ema"])
        assert metrics["valid/parameters/written"] == wanted["valid/parameters/written"] == by_hand(whole["model"])
        assert metrics["valid/loss"] == pytest.approx(wanted["valid/loss"], rel=1e-14)  # a sum over ranks


@pytest.mark.parametrize(("schedule", "ranks"), CUTS)
def test_a_teacher_in_stages_has_the_bits_of_one_process(on_ranks: OnRanks, schedule: str, ranks: int) -> None:
    wanted = alone(Taught)
    wanted.train()
    untaught = alone()
    untaught.train()
    assert not same(wanted.state_dict(), untaught.state_dict())

    def act(group: Any) -> Any:
        trainer = staged(group, schedule, ranks, task=Taught)
        trainer.train()
        return trainer.state_dict()

    assert same(on_ranks(ranks, act)[0], wanted.state_dict())


def zero1(group: Any) -> Any:
    return Zero1(Ordered(group))


@pytest.mark.parametrize("strategy", [Ordered, Ddp, zero1])
def test_replicas_of_pipelines_evaluate_and_are_taught_alike(on_ranks: OnRanks, strategy: Any) -> None:
    def act(group: Any) -> Any:
        trainer = staged(group, "1f1b", 2, strategy, Taught, train=frozen())
        return trainer.train().metrics, trainer.state_dict(), trainer.storage.history("valid/calls")

    def frozen() -> Training:  # else statistics are means over replicas
        return Training(ema=Ema(decay=0.6, evaluated="both"), norm_statistics="frozen")

    found = on_ranks(4, act)
    wanted = alone(Taught, train=frozen())
    metrics = wanted.train().metrics
    state = wanted.state_dict()
    if strategy is not Ddp:
        assert same(found[0][1], state)
    assert all(torch.allclose(found[0][1]["model"][name], one, rtol=1e-12) for name, one in state["model"].items())
    for mine, _, calls in found:
        assert mine["valid/written"] == metrics["valid/written"] and calls[-1].weight == 7


def test_a_run_with_a_teacher_goes_on_with_other_stages(on_ranks: OnRanks) -> None:
    begun: dict[str, Any] = {}

    def first(group: Any) -> Any:
        trainer = staged(group, "1f1b", 2, task=Taught, updates=2)
        trainer.train()
        return trainer.state_dict()

    def then(group: Any) -> Any:
        trainer = staged(group, "zb_v", 3, task=Taught)
        trainer.load_state_dict(begun)
        trainer.train()
        return trainer.state_dict()

    begun |= on_ranks(2, first)[0]
    wanted = alone(Taught)
    wanted.train()
    assert same(on_ranks(3, then)[0], wanted.state_dict())


def test_an_evaluation_may_ask_the_average_on_every_rank_of_a_pipeline(on_ranks: OnRanks) -> None:
    class Compares(Taught):
        def evaluate(self, model: Any, batch: Any) -> Loss:
            apart = (model(**self.inputs(batch)) - self.now.teacher(self.inputs(batch))).abs().max()
            return Loss(None, metrics={"apart": (apart, 1.0)})

    def act(group: Any) -> Any:
        return valid(staged(group, "1f1b", 3, task=Compares).train().metrics)

    for metrics in on_ranks(3, act):
        assert metrics["valid/apart"] == 0.0 < metrics["valid/parameters/apart"]


def test_a_teacher_that_is_asked_where_it_is_not_says_where_it_is(on_ranks: OnRanks) -> None:
    class Early(Taught):
        def transform(self, batch: Any) -> Any:
            self.now.teacher(self.inputs(batch))
            return batch

    def act(group: Any) -> Any:
        with pytest.raises(Exception, match=r"whole on the rank of the last one.*ask it in `postprocess`, `loss`"):
            staged(group, "1f1b", 2, task=Early, train=Training(ema=Ema(), check_loss=False)).train()

    on_ranks(2, act)
    task = Taught()
    here = trainer_of(PipelineModel(Writer()), Ordered(), task)
    assert here.model.training
    with pytest.raises(TaskError, match="while that has batches"):
        task.now.teacher({})


@pytest.mark.parametrize("task", [Write, Taught])
def test_a_rank_without_memory_for_the_whole_model_says_so(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("a wish")

    trainer = alone(task, train=Training(ema=Ema(), check_loss=False))
    monkeypatch.setattr(whole_model, "_content", full)
    with pytest.raises(OutOfMemoryError, match="pipeline rank 0 has no memory for the whole model"):
        trainer.train()


def test_what_came_into_being_after_the_cut_is_said(on_ranks: OnRanks) -> None:
    def act(group: Any) -> Any:
        trainer = staged(group, "1f1b", 2)
        if group.rank == 0:
            trainer.model.get_submodule("reader").register_buffer("mask", torch.ones(1))
        held = Writer()
        held.reader.register_buffer("mask", torch.ones(1))  # as it says
        WholeModel(PipelineModel(held), Wire(Group(), torch.device("cpu"))).gathered(ranks=(0,))
        with pytest.raises(Exception, match=r"`reader.mask` is new since the model was put in stages.*let layers have"):
            trainer.evaluate()

    on_ranks(2, act)


def test_predictions_may_ask_the_average(on_ranks: OnRanks) -> None:
    class Predicts(Taught):
        def predict(self, output: Tensor, batch: Any) -> Tensor:
            return self.now.teacher(self.inputs(batch)) - output

    def act(group: Any) -> Any:
        trainer = staged(group, "interleaved", 2, task=Predicts, train=Training(ema=Ema(), check_loss=False))
        kept = trainer.predict(MapData(texts(3), global_batch_size=3, micro_batch_size=1, shuffle=False))
        return [float(one.output.abs().max()) for one in kept]

    assert on_ranks(2, act) == [[0.0] * 3, []]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_in_16_bits_the_whole_is_called_as_on_one_process(on_ranks: OnRanks, precision: str) -> None:
    class Compares(Called):
        uses_average = True

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            taught = self.now.teacher(batch * 2)
            assert taught.dtype == output.dtype
            return ((output - taught) ** 2).sum() + output.sum()

    def act(group: Any) -> Any:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in model.parameters():
                one.uniform_(-1, 1, generator=generator)
        mesh = Mesh.of(group, pipeline=group.ranks)
        staged = PipelineModel(model, mesh=mesh)
        points = [torch.tensor([float(n), 1.0]) for n in range(4)]
        trainer = Trainer(
            model=staged,
            task=Compares(),
            optimizer=torch.optim.SGD(staged.parameters(), lr=0.01),
            data=MapData(points, global_batch_size=4, micro_batch_size=2, shuffle=False),
            evaluations=MapData(points, global_batch_size=4, micro_batch_size=4, shuffle=False),
            updates=3,
            device="cpu",
            precision=precision,
            strategy=Ordered(mesh.data),
            train=Training(ema=Ema(decay=0.5), check_loss=False),
            log=Logging(writers=()),
        )
        return trainer.train().metrics["valid/sum"]

    [alone] = on_ranks(1, act)
    assert on_ranks(2, act) == [alone, alone]


class Called(Task):
    """Calls what it is given, of which it knows nothing."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output**2).sum()

    def evaluate(self, model: Any, batch: Any) -> Loss:
        output = model(self.inputs(batch))
        return Loss(None, metrics={"sum": (output.sum(), 1.0)})


def test_layers_that_functions_build_are_called_in_turn(on_ranks: OnRanks) -> None:
    def filled(place: int) -> nn.Module:
        linear = nn.Linear(2, 2).double()
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for one in linear.parameters():
                one.copy_(torch.randn(one.shape, generator=generator))
        return linear

    def trainer(mesh: Mesh) -> Trainer:
        model = PipelineModel([lambda place=place: filled(place) for place in range(3)], mesh=mesh)
        points = [torch.tensor([float(n), 1.0]).double() for n in range(4)]
        return Trainer(
            model=model,
            task=Called(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.001),
            data=MapData(points, global_batch_size=4),
            evaluations=MapData(points, global_batch_size=4, micro_batch_size=1, shuffle=False),
            updates=2,
            strategy=Ordered(mesh.data),
            log=Logging(writers=()),
        )

    wanted = trainer(Mesh()).train().metrics["valid/sum"]
    for metrics in on_ranks(2, lambda group: trainer(Mesh.of(group, pipeline=2)).train().metrics):
        assert metrics["valid/sum"] == pytest.approx(wanted, rel=1e-14)


def test_a_model_that_only_says_its_layers_can_be_called(on_ranks: OnRanks) -> None:
    class Says(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(2, 2).double() for _ in range(2))
            with torch.no_grad():
                for number, one in enumerate(self.parameters()):
                    one.fill_(number + 0.5)

        def layers(self) -> list[Layer]:
            return [Layer("a", self.a), Layer("b", self.b)]

    def act(group: Any) -> Any:
        model = PipelineModel(Says(), mesh=Mesh.of(group, pipeline=2))
        data = MapData([torch.tensor([float(n), 1.0]).double() for n in range(4)], global_batch_size=4)
        sgd = torch.optim.SGD(model.parameters(), lr=0.001)
        one = Trainer(model=model, task=Called(), optimizer=sgd, data=data, evaluations=data, updates=1, device="cpu")
        return one.evaluate()["valid"]["sum"]

    x = torch.tensor([[float(n), 1.0] for n in range(4)]).double()
    model = Says()
    assert on_ranks(2, act) == [model.b(model.a(x)).sum().item()] * 2


class Locked(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle a lock")


class Anew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def layers(self) -> list[Layer]:
        return [Layer("a", lambda: nn.Linear(2, 2)), Layer("b", lambda: nn.Linear(2, 2))]


class Besides(Anew):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(2), persistent=False)

    def layers(self) -> list[Layer]:
        return [Layer("a", self.a), Layer("b", nn.ReLU())]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            nn.Sequential(Locked(2, 2)),
            r"`copy.deepcopy` can't copy Sequential \(TypeError: cannot pickle a lock\); keep",
        ),
        (Anew(), r"`Anew.layers\(\)` gives functions that build layers anew; let it"),
        (Besides(), r"`Besides.layers\(\)` gives no layer that holds the model's own `positions`; let it"),
    ],
)
def test_models_that_can_not_be_put_together_are_refused_by_name(model: nn.Module, text: str) -> None:
    trainer_of(model, None, Called())  # as it says
    with pytest.raises(ArgumentError, match=f"`Called.evaluate` is given the whole model, .*but {text}.* instead of"):
        trainer_of(PipelineModel(model), None, Called())


def test_layers_and_formats_that_are_changed_after_the_cut_are_refused_by_name() -> None:
    class Rounds(nn.Linear):
        evenstep_not_for: Any = {"whole of stages": "which rounds; leave it out"}  # noqa: RUF012

    model = nn.Sequential(nn.Linear(16, 16), Rounds(16, 16))
    with pytest.raises(ArgumentError, match=r"is given the whole model, but `1` is a Rounds, which rounds; leave it"):
        trainer_of(PipelineModel(model), None, Called())
    only_taught = type("Learns", (Taught,), {"evaluate": Task.evaluate})
    with pytest.raises(ArgumentError, match=r"asks the average of the model, but `1` is a Rounds, which rounds"):
        trainer_of(PipelineModel(model), None, only_taught())
    taught = PipelineModel(nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(ArgumentError, match=r"asks the average .* 'float8-mixed' changes the layers .*'bf16-mixed'"):
        trainer_of(taught, None, only_taught(), precision=Float8Mixed(emulate=True))


def test_statistics_of_each_task_are_refused_by_name() -> None:
    model = PipelineModel(Writer())
    sets = {"a": MapData(texts(), global_batch_size=4)}
    with pytest.raises(ArgumentError, match=r'`norm_statistics` is "per-task", which only the stages know of'):
        Trainer(
            model=model,
            task={"a": Write()},
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=Mixture(sets),
            updates=1,
            train=Training(norm_statistics="per-task"),
        )
