"""Tasks that evaluate by themselves, by generating: word error rate and BLEU, over any cut and ranks."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Engine, Logging, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import TaskError
from evenstep.parallel import Ddp

WORDS, LONGEST = 5, 6
ORDERS = range(1, 5)


class Writer(nn.Module):
    """The word that follows each word, and a text that it writes by always taking the likeliest."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WORDS, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.scores(nn.functional.one_hot(words, WORDS).to(self.scores.weight.dtype))

    def write(self, first: Tensor, length: int) -> Tensor:
        text = [first]
        for _ in range(length - 1):
            text.append(self(text[-1]).argmax(-1))
        return torch.stack(text, 1)


def edits(mine: Sequence[int], wanted: Sequence[int]) -> int:
    """The edit distance of two texts (Wagner and Fischer 1974)."""
    row = list(range(len(wanted) + 1))
    for number, word in enumerate(mine, start=1):
        before, row[0] = row[0], number
        for place, other in enumerate(wanted, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != other))
    return row[-1]


def ngrams(text: Sequence[int], order: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[at : at + order]) for at in range(len(text) - order + 1))


def bleu_of(counts: Any) -> float:
    """BLEU with one added to each count above words (Lin and Och 2004), from the counts of all texts together."""
    logs = [math.log((counts[f"match{n}"] + (n > 1)) / (counts[f"all{n}"] + (n > 1)) or 1e-9) for n in ORDERS]
    return min(1.0, math.exp(1 - counts["wanted"] / counts["written"])) * math.exp(sum(logs) / len(logs))


def counts_of(mine: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> dict[str, int]:
    counts: Counter[str] = Counter(written=0, wanted=0)
    for one, other in zip(mine, wanted, strict=True):
        counts["written"] += len(one)
        counts["wanted"] += len(other)
        for n in ORDERS:
            counts[f"match{n}"] += (ngrams(one, n) & ngrams(other, n)).total()
            counts[f"all{n}"] += max(0, len(one) - n + 1)
    return dict(counts)


class Write(Task):
    """Trains on the next word; evaluates the texts that the model writes."""

    derived: Any = {"bleu": bleu_of, "ppl": lambda metrics: math.exp(metrics["loss"])}  # noqa: RUF012

    def inputs(self, batch: Any) -> Any:
        return batch["text"][:, :-1]

    def weight(self, batch: Any) -> float:
        return float(batch["text"][:, 1:].numel())

    def loss(self, output: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["text"][:, 1:].flatten(), reduction="sum")

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        assert not model.training and not torch.is_grad_enabled() and not self.now.is_training
        lengths: list[int] = batch["length"].tolist()
        wanted = [row[:length] for row, length in zip(batch["text"].tolist(), lengths, strict=True)]
        texts: Tensor = model.write(batch["text"][:, 0], LONGEST - 1)  # pyright: ignore
        mine: list[list[int]] = texts.tolist()
        wrong = sum(edits(one, other) for one, other in zip(mine, wanted, strict=True))
        return Loss(None, metrics={"wer": (wrong, sum(lengths))}, counts=counts_of(mine, wanted))


class Beside(Write):
    """The same, and the loss."""

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        loss: Any = Task.evaluate(self, model, batch)
        return replace(super().evaluate(model, batch), sum=loss)


def texts(count: int = 11) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {"text": torch.randint(WORDS, (LONGEST,), generator=generator), "length": torch.tensor(2 + n % (LONGEST - 1))}
        for n in range(count)
    ]


def writer() -> Writer:
    model = Writer().double()
    generator = torch.Generator().manual_seed(1)  # of its own: ranks that are threads share torch's
    with torch.no_grad():
        for one in model.parameters():
            one.uniform_(-1, 1, generator=generator)
    return model


def valid(size: int = 4, micro: int = 4) -> MapData:
    return MapData(texts(), global_batch_size=size, micro_batch_size=micro, shuffle=False)


def trainer_of(task: Any = None, model: nn.Module | None = None, **more: Any) -> Trainer:
    model = model or writer()
    more.setdefault("data", MapData(texts(8), global_batch_size=4, micro_batch_size=2, shuffle=False))
    more.setdefault("evaluations", valid())
    return Trainer(
        model=model,
        task=task or Write(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        updates=more.pop("updates", 3),
        device="cpu",
        log=Logging(writers=()),
        **more,
    )


def by_hand(model: Any) -> dict[str, float]:
    """Of all texts at once, in plain Python."""
    wanted = [one["text"][: int(one["length"])].tolist() for one in texts()]
    mine = model.write(torch.stack([one["text"][0] for one in texts()]), LONGEST - 1).tolist()
    wer = sum(edits(one, other) for one, other in zip(mine, wanted, strict=True)) / sum(map(len, wanted))
    return {"wer": wer, "bleu": bleu_of(counts_of(mine, wanted))}


def test_what_is_generated_is_scored_as_all_texts_at_once_and_no_loss_is_made_up() -> None:
    model = writer()
    trainer = trainer_of(model=model)
    found = trainer.train().metrics
    assert {name: found[f"valid/{name}"] for name in ("wer", "bleu")} == by_hand(model)
    assert "valid/loss" not in found and "valid/no_loss" not in found and "valid/ppl" not in found
    assert found["train/ppl"] == math.exp(found["train/loss"])
    assert trainer.storage.history("valid/bleu")[-1].weight == 11 * (LONGEST - 1)
    assert not any("match" in name for name in trainer.storage.names())


@pytest.mark.parametrize("size, micro", [(11, 11), (4, 1), (5, 2), (1, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_cut_on_any_ranks_gives_the_same_bits(
    on_ranks: Callable[..., list[Any]], size: int, micro: int, ranks: int
) -> None:
    def act(group: Any) -> Any:
        trainer = trainer_of(strategy=Ddp(group), evaluations=valid(size, micro))
        return trainer.evaluate()["valid"]

    for found in on_ranks(ranks, act):
        assert found == by_hand(writer())


def test_the_loss_is_also_reported_if_the_task_computes_it() -> None:
    model = writer()
    found = trainer_of(Beside(), model, updates=1).train().metrics
    with torch.no_grad():
        text = torch.stack([one["text"] for one in texts()])
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).item()
    assert found["valid/loss"] == pytest.approx(loss, rel=1e-12)
    assert found["valid/ppl"] == math.exp(found["valid/loss"])
    assert {name: found[f"valid/{name}"] for name in ("wer", "bleu")} == by_hand(model)


def test_it_is_evaluated_with_the_average_the_parameters_or_both() -> None:
    model = writer()
    trainer = trainer_of(model=model, train=Training(ema=Ema(decay=0.9, evaluated="both")), updates=6)
    found = trainer.train().metrics
    assert found["valid/parameters/bleu"] == by_hand(model)["bleu"]
    with trainer._loop.engine.evaluator.parameters(average=True):
        assert found["valid/bleu"] == by_hand(model)["bleu"]


def test_what_does_not_fit_into_memory_is_generated_in_parts() -> None:
    class Small(Write):
        def evaluate(self, model: nn.Module, batch: Any) -> Loss:
            if len(batch["text"]) > 1:
                raise MemoryError("a wish")
            return super().evaluate(model, batch)

    assert trainer_of(Small()).evaluate()["valid"] == by_hand(writer())


def test_in_16_bits_the_model_is_called_in_its_own_format() -> None:
    class Called(Task):
        def loss(self, output: Any, batch: Any) -> Tensor:
            return ((output - batch[1]) ** 2).sum()

        def evaluate(self, model: nn.Module, batch: Any) -> Loss:
            output = model(batch[0])
            assert output.dtype == torch.float32 and next(model.parameters()).dtype == torch.bfloat16
            return Loss(((output - batch[1]) ** 2).sum(), metrics={"seen": (len(output), 1)})

    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, Called(), sgd, device="cpu", precision="bf16-true")
    batch = torch.ones(2, 3), torch.zeros(2, 1)
    mine = engine.evaluate(batch)
    assert mine["seen"] == 2
    plain = Engine(
        (other := nn.Linear(3, 1)),
        type("Plain", (Called,), {"evaluate": Task.evaluate})(),
        torch.optim.SGD(other.parameters(), lr=0.1),
        device="cpu",
        precision="bf16-true",
    )
    other.load_state_dict(model.state_dict())
    assert plain.evaluate(batch)["loss"] == mine["loss"]


def test_batches_without_labels_are_evaluated_and_losses_of_others_are_still_checked() -> None:
    class Unlabelled(Write):
        def weight(self, batch: Any) -> float:
            return float(len(batch["first"])) if "first" in batch else super().weight(batch)

        def evaluate(self, model: Any, batch: Any) -> Loss:
            return Loss(None, metrics={"twos": ((model.write(batch["first"], 3) == 2).sum(), 3 * len(batch["first"]))})

    firsts = [{"first": torch.tensor(number)} for number in range(WORDS)]
    trainer = trainer_of(Unlabelled(), evaluations=MapData(firsts, global_batch_size=2, shuffle=False))
    found = trainer.evaluate()["valid"]  # before anything is trained: its loss is not looked at
    wanted = (writer().write(torch.arange(WORDS), 3) == 2).double().mean().item()
    assert found == {"twos": pytest.approx(wanted, rel=1e-12)}
    with pytest.raises(TaskError):
        trainer_of(type("Mean", (Unlabelled,), {"loss": lambda self, out, batch: out.mean()})()).train()


def test_each_of_several_tasks_evaluates_in_its_own_way() -> None:
    sets = {name: MapData(texts(8), global_batch_size=4, shuffle=False) for name in ("a", "b")}
    valid_sets = {name: MapData(texts(), global_batch_size=4, shuffle=False) for name in ("a", "b")}
    plain = type("Plain", (Write,), {"evaluate": Task.evaluate, "derived": {}})()
    model = writer()
    found = trainer_of(
        {"a": Write(), "b": plain}, model, data=Mixture(sets), evaluations=Mixture(valid_sets, end="max")
    )
    metrics = found.train().metrics
    assert {name: metrics[f"valid/a/{name}"] for name in ("wer", "bleu")} == by_hand(model)
    assert "valid/a/loss" not in metrics and "valid/b/loss" in metrics and "valid/b/bleu" not in metrics


@pytest.mark.parametrize("compile", ["off", pytest.param("update", marks=pytest.mark.slow)])
def test_counts_of_training_are_derived_too(compile: Any) -> None:
    class Hits(Task):
        derived: Any = {"hits": lambda metrics: metrics["hit"] ** 2}  # noqa: RUF012

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss((output**2).sum(), counts={"hit": torch.tensor(len(output))})

    model = nn.Linear(3, 1)
    engine = Engine(
        model, Hits(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", train=Training(compile=compile)
    )
    outcome: Any = engine.update(microbatches=[(torch.ones(2, 3),), (torch.ones(3, 3),)])
    assert outcome.metrics()["hits"] == 25
