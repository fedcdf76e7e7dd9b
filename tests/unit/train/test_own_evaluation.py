"""Tasks that evaluate by themselves, by generating: edit distance and perplexity, over any cut and ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import TaskError
from evenstep.parallel import Ddp
from kit import Squares, engine_of, filled, line
from kit import trainer_of as trainer_of_kit

WORDS, LONGEST = 5, 6


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


def counts_of(mine: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> dict[str, int]:
    pairs = list(zip(mine, wanted, strict=True))
    return {"wrong": sum(edits(*pair) for pair in pairs), "wanted": sum(len(one) for one in wanted)}


class Write(Task):
    """Trains on the next word; evaluates the texts that the model writes."""

    derived: Any = {  # noqa: RUF012
        "wer": lambda counts: counts["wrong"] / counts["wanted"],
        "ppl": lambda metrics: math.exp(metrics["loss"]),
    }

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
        return Loss(None, metrics={"length": (sum(lengths), len(lengths))}, counts=counts_of(texts.tolist(), wanted))


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
    return filled(Writer().double(), 1)


def data(count: int = 11, size: int = 4, micro: int = 4) -> MapData:
    return MapData(texts(count), global_batch_size=size, micro_batch_size=micro, shuffle=False)


def trainer_of(task: Any = None, model: nn.Module | None = None, **more: Any) -> Trainer:
    given = {"updates": 3, "data": data(8, micro=2), "evaluations": data(), "task": task or Write()}
    return trainer_of_kit(model or writer(), **given | more)


def by_hand(model: Any) -> dict[str, float]:
    """Of all texts at once, in plain Python."""
    wanted = [one["text"][: int(one["length"])].tolist() for one in texts()]
    counts = counts_of(model.write(torch.stack([one["text"][0] for one in texts()]), LONGEST - 1).tolist(), wanted)
    return {"wer": counts["wrong"] / counts["wanted"], "length": counts["wanted"] / len(wanted)}


def test_generated_texts_are_scored_as_all_at_once_and_no_loss_is_made_up() -> None:
    model = writer()
    trainer = trainer_of(model=model)
    found = trainer.train().metrics
    assert {name: found[f"valid/{name}"] for name in ("wer", "length")} == by_hand(model)
    assert not {"valid/loss", "valid/no_loss", "valid/ppl"} & found.keys()
    assert found["train/ppl"] == math.exp(found["train/loss"])
    assert not any("wrong" in name for name in trainer.storage.names())


@pytest.mark.parametrize(("ranks", "size", "micro"), [(1, 4, 1), (2, 11, 11), (3, 5, 2)])
def test_every_cut_on_any_ranks_gives_the_same_bits(on_ranks: Any, ranks: int, size: int, micro: int) -> None:
    def act(group: Any) -> Any:
        return trainer_of(strategy=Ddp(group), evaluations=data(size=size, micro=micro)).evaluate()["valid"]

    assert on_ranks(ranks, act) == [by_hand(writer())] * ranks


def test_the_loss_is_also_reported_if_the_task_computes_it() -> None:
    model = writer()
    found = trainer_of(Beside(), model, updates=1).train().metrics
    with torch.no_grad():
        text = torch.stack([one["text"] for one in texts()])
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).item()
    assert found["valid/loss"] == pytest.approx(loss, rel=1e-12)
    assert found["valid/ppl"] == math.exp(found["valid/loss"])
    assert found["valid/wer"] == by_hand(model)["wer"]


def test_it_is_evaluated_with_the_average_the_parameters_or_both() -> None:
    model, averaged = writer(), writer()
    trainer = trainer_of(model=model, train=Training(ema=Ema(decay=0.9, evaluated="both")), updates=6)
    found = trainer.train().metrics
    averaged.load_state_dict(trainer.state_dict()["ema"])
    assert found["valid/parameters/wer"] == by_hand(model)["wer"]
    assert found["valid/wer"] == by_hand(averaged)["wer"]


def test_batches_that_do_not_fit_into_memory_are_generated_in_parts() -> None:
    class Small(Write):
        def evaluate(self, model: nn.Module, batch: Any) -> Loss:
            if len(batch["text"]) > 1:
                raise MemoryError("injected")
            return super().evaluate(model, batch)

    assert trainer_of(Small()).evaluate()["valid"] == by_hand(writer())


def test_in_16_bits_the_model_is_called_in_its_own_format() -> None:
    class Called(Squares):
        def evaluate(self, model: nn.Module, batch: Any) -> Loss:
            output = model(batch[0])
            assert output.dtype == torch.float32 and next(model.parameters()).dtype == torch.bfloat16
            return Loss(((output.squeeze(-1) - batch[1]) ** 2).sum(), metrics={"seen": (len(output), 1)})

    batch = torch.ones(2, 3), torch.zeros(2)
    mine, plain = (
        engine_of(line(torch.float32), task, precision="bf16-true").evaluate(batch) for task in (Called(), Squares())
    )
    assert mine == plain | {"seen": 2}


def test_batches_without_labels_are_evaluated_and_losses_of_others_are_still_checked() -> None:
    class Unlabelled(Write):
        def weight(self, batch: Any) -> float:
            return float(len(batch["first"])) if "first" in batch else super().weight(batch)

        def evaluate(self, model: Any, batch: Any) -> Loss:
            return Loss(None, metrics={"twos": ((model.write(batch["first"], 3) == 2).sum(), 3 * len(batch["first"]))})

    firsts = [{"first": torch.tensor(number)} for number in range(WORDS)]
    trainer = trainer_of(Unlabelled(), evaluations=MapData(firsts, global_batch_size=2, shuffle=False))
    wanted = (writer().write(torch.arange(WORDS), 3) == 2).double().mean().item()
    assert trainer.evaluate()["valid"] == {"twos": pytest.approx(wanted, rel=1e-12)}
    with pytest.raises(TaskError):
        trainer_of(type("Mean", (Unlabelled,), {"loss": lambda self, out, batch: out.mean()})()).train()


def test_each_of_several_tasks_evaluates_in_its_own_way() -> None:
    plain, model = type("Plain", (Write,), {"evaluate": Task.evaluate, "derived": {}})(), writer()
    sets, valid = (Mixture({name: data(count) for name in "ab"}, end="max") for count in (8, 11))
    metrics = trainer_of({"a": Write(), "b": plain}, model, data=sets, evaluations=valid).train().metrics
    assert metrics["valid/a/wer"] == by_hand(model)["wer"]
    assert "valid/a/loss" not in metrics and "valid/b/loss" in metrics and "valid/b/wer" not in metrics


@pytest.mark.parametrize("compile", ["off", pytest.param("update", marks=pytest.mark.slow)])
def test_counts_of_training_are_derived_too(compile: Any) -> None:
    class Hits(Task):
        derived: Any = {"hits": lambda metrics: metrics["hit"] ** 2}  # noqa: RUF012

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss((output**2).sum(), counts={"hit": torch.tensor(len(output))})

    engine = engine_of(line(torch.float32), Hits(), train=Training(compile=compile))
    outcome: Any = engine.update(microbatches=[(torch.ones(2, 3),), (torch.ones(3, 3),)])
    assert outcome.metrics()["hits"] == 25
