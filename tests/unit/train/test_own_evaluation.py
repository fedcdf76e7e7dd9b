"""Tasks that evaluate by themselves, by calling the model as often as they like, over any cut and ranks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import TaskError
from evenstep.parallel import Ddp
from kit import Squares, data, engine_of, line, net, points, stacked
from kit import trainer_of as trainer_of_kit


def counts_of(model: Any, x: Tensor) -> dict[str, int]:
    """Of how many samples the output rises, where the inputs are doubled; and of how many in all."""
    with torch.no_grad():
        return {"rise": int((model(2 * x) > model(x)).sum()), "all": len(x)}


class Rises(Squares):
    """Trains on squares; evaluates counts."""

    derived: Any = {  # noqa: RUF012
        "rate": lambda counts: counts["rise"] / counts["all"],
        "ppl": lambda metrics: math.exp(metrics["loss"]),
    }

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        assert not model.training and not torch.is_grad_enabled() and not self.now.is_training
        return Loss(None, metrics={"calls": (2, 1)}, counts=counts_of(model, batch[0]))


class Beside(Rises):
    """The same, and the loss."""

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        loss: Any = Task.evaluate(self, model, batch)
        return replace(super().evaluate(model, batch), sum=loss)


def counting(task: Any = None, model: nn.Module | None = None, **more: Any) -> Trainer:
    given = {"evaluations": data(11, size=4, micro=4), "task": task or Rises()}
    return trainer_of_kit(model, **given | more)


def by_hand(model: Any) -> dict[str, float]:
    counts = counts_of(model, stacked(points(11))[0])
    return {"rate": counts["rise"] / counts["all"], "calls": 2.0}


def test_counts_are_of_all_samples_at_once_and_no_loss_is_made_up() -> None:
    trainer = counting()
    found = trainer.train().metrics
    assert {name: found[f"valid/{name}"] for name in ("rate", "calls")} == by_hand(trainer.model)
    assert 0 < found["valid/rate"] < 1
    assert not {"valid/loss", "valid/no_loss", "valid/ppl", "valid/rise"} & found.keys()
    assert found["train/ppl"] == math.exp(found["train/loss"])


@pytest.mark.parametrize(("ranks", "size", "micro"), [(1, 4, 1), (2, 11, 11), (3, 5, 2)])
def test_every_cut_on_any_ranks_gives_the_same_bits(on_ranks: Any, ranks: int, size: int, micro: int) -> None:
    def act(group: Any) -> Any:
        return counting(strategy=Ddp(group), evaluations=data(11, size=size, micro=micro)).evaluate()["valid"]

    assert on_ranks(ranks, act) == [by_hand(net())] * ranks


def test_the_loss_is_also_reported_if_the_task_computes_it() -> None:
    trainer = counting(Beside())
    found = trainer.train().metrics
    x, y = stacked(points(11))
    with torch.no_grad():
        loss = ((trainer.model(x).squeeze(-1) - y) ** 2).mean().item()
    assert found["valid/loss"] == pytest.approx(loss, rel=1e-12)
    assert found["valid/ppl"] == math.exp(found["valid/loss"])
    assert found["valid/rate"] == by_hand(trainer.model)["rate"]


@pytest.mark.parametrize("evaluated", ["average", "parameters"])
def test_it_is_evaluated_with_the_average_or_the_parameters(evaluated: Any) -> None:
    trainer, averaged = counting(train=Training(ema=Ema(decay=0.9, evaluated=evaluated))), net()
    found = trainer.train().metrics
    averaged.load_state_dict(trainer.state_dict()["ema"])
    assert found["valid/rate"] == by_hand(averaged if evaluated == "average" else trainer.model)["rate"]


def test_batches_that_do_not_fit_into_memory_are_evaluated_in_parts() -> None:
    class Small(Rises):
        def evaluate(self, model: nn.Module, batch: Any) -> Loss:
            if len(batch[0]) > 1:
                raise MemoryError("injected")
            return super().evaluate(model, batch)

    assert counting(Small()).evaluate()["valid"] == by_hand(net())


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
    class Unlabelled(Rises):
        def evaluate(self, model: Any, batch: Any) -> Loss:
            return Loss(None, counts=counts_of(model, batch["x"]))

    firsts = [{"x": x} for x, _ in points(11)]
    trainer = counting(Unlabelled(), evaluations=MapData(firsts, global_batch_size=2, shuffle=False))
    assert trainer.evaluate()["valid"] == {"rate": by_hand(net())["rate"]}
    with pytest.raises(TaskError):
        counting(type("Mean", (Rises,), {"loss": lambda self, out, batch: out.mean()})()).train()


def test_each_of_several_tasks_evaluates_in_its_own_way() -> None:
    plain, model = type("Plain", (Rises,), {"evaluate": Task.evaluate, "derived": {}})(), net()
    sets, valid = (Mixture({name: data(count, size=4) for name in "ab"}, end="max") for count in (8, 11))
    metrics = counting({"a": Rises(), "b": plain}, model, data=sets, evaluations=valid).train().metrics
    assert metrics["valid/a/rate"] == by_hand(model)["rate"]
    assert "valid/a/loss" not in metrics and "valid/b/loss" in metrics and "valid/b/rate" not in metrics


@pytest.mark.parametrize("compile", ["off", pytest.param("update", marks=pytest.mark.slow)])
def test_counts_of_training_are_derived_too(compile: Any) -> None:
    class Hits(Task):
        derived: Any = {"hits": lambda metrics: metrics["hit"] ** 2}  # noqa: RUF012

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss((output**2).sum(), counts={"hit": torch.tensor(len(output))})

    engine = engine_of(line(torch.float32), Hits(), train=Training(compile=compile))
    outcome: Any = engine.update(microbatches=[(torch.ones(2, 3),), (torch.ones(3, 3),)])
    assert outcome.metrics()["hits"] == 25
