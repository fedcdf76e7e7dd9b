"""Whole models out of stages: tasks that evaluate by themselves, and tasks that ask the average, as on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Logging, Loss, MapData, Task, Trainer, Training
from evenstep.errors import ArgumentError, TaskError
from evenstep.parallel import Ddp, Mesh, Ordered, Zero1
from evenstep.pipeline import SCHEDULES, Layer, Layers, PipelineModel

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


def staged(group: Any, schedule: str, pipeline: int, strategy: Any = Ordered, task: Any = Write, **more: Any) -> Trainer:
    mesh = Mesh.of(group, pipeline=pipeline)
    model = PipelineModel(Writer(), mesh=mesh, schedule=schedule, relay_skips=True)
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
    model.load_state_dict(state, strict=False)
    wrote = model.eval().write(torch.stack([one["source"] for one in texts(7)]))
    return float(wrote.sum()) / wrote.numel()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_what_is_written_in_stages_is_what_a_plain_model_writes(on_ranks: OnRanks, schedule: str, ranks: int) -> None:
    def act(group: Any) -> Any:
        trainer = staged(group, schedule, ranks)
        return trainer.train().metrics, trainer.state_dict(), trainer.storage.history("valid/calls")

    wanted = alone().train().metrics
    for metrics, state, calls in on_ranks(ranks, act):
        assert valid(metrics).keys() == valid(wanted).keys() and calls[-1].weight == 7
        for name in ("valid/written", "valid/parameters/written"):
            assert metrics[name] == wanted[name]
        assert metrics["valid/loss"] == pytest.approx(wanted["valid/loss"], rel=1e-14)  # sums of ranks, in another order
        if "ema" in state and "reader.words.weight" in state["model"] and "score.weight" in state["model"]:
            assert metrics["valid/written"] == by_hand(state["ema"] | {"score.weight": state["ema"]["words.weight"]})
            assert metrics["valid/parameters/written"] == by_hand(state["model"])
