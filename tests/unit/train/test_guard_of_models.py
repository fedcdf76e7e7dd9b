"""The guard of normalisation with losses that are no plain sums of outputs: of derivatives, and of whole batches."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Committed, Engine, Loss, Task, Training
from evenstep.errors import OutOfMemoryError, TaskError


def engine_of(task: Task, model: nn.Module | None = None, **train: Any) -> Engine:
    torch.manual_seed(0)
    model = (model or nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Engine(model, task, optimizer, device="cpu", train=Training(**train))


def points(count: int = 12) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Residual(Task):
    """The slope of the output must be 1 everywhere: a derivative in the loss."""

    mean = False

    def inputs(self, batch: Any) -> Any:
        self._points = batch.clone().requires_grad_()
        return self._points

    def loss(self, output: Any, batch: Any) -> Tensor:
        (slope,) = torch.autograd.grad(output.sum(), self._points, create_graph=True)
        squares = (slope - 1).square()
        return squares.mean() if self.mean else squares.sum()


class MeanResidual(Residual):
    mean = True


class Evaluated(Residual):
    def evaluate(self, model: nn.Module, batch: Any) -> Loss | Tensor | None:
        with torch.enable_grad():
            return super().evaluate(model, batch)


def test_a_mean_of_derivatives_is_refused_and_a_sum_of_them_is_not() -> None:
    with pytest.raises(TaskError, match=r"`MeanResidual.loss` gives a mean"):
        engine_of(MeanResidual()).update(points())
    assert engine_of(Residual()).update(points()).update == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_looking_at_a_loss_of_derivatives_leaves_no_trace() -> None:
    checked, unchecked = engine_of(Residual()), engine_of(Residual(), check_loss=False)
    for engine in (checked, unchecked):
        engine.update(points()[:7], points()[7:])
    for one, other in zip(checked.model.parameters(), unchecked.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_loss_of_derivatives_can_not_be_evaluated_as_it_is_and_the_advice_works() -> None:
    engine = engine_of(Residual())
    engine.update(points())
    with pytest.raises(RuntimeError) as raised:
        engine.evaluate(points())
    assert "`with torch.enable_grad(): return super().evaluate(model, batch)`" in "".join(raised.value.__notes__)
    engine = engine_of(Evaluated())
    engine.update(points())
    (slope,) = torch.autograd.grad(engine.model(at := points().requires_grad_()).sum(), at)
    assert engine.evaluate(points()[:5], points()[5:])["loss"] == pytest.approx(float((slope - 1).square().sum()) / 12)


@pytest.mark.slow
def test_a_loss_of_derivatives_of_what_is_compiled_is_refused_with_what_to_do() -> None:
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="double backward") as raised:
        engine_of(Residual(), compile="model").update(points())
    assert "the loss takes some itself. Set `compile` to 'off'" in "".join(raised.value.__notes__)
    assert isinstance(engine_of(Residual(), compile="off").update(points()), Committed)


def decorrelated(output: Tensor) -> Tensor:
    """Barlow Twins' kind: the correlation of features over the batch."""
    features = (output - output.mean(0)) / output.std(0)
    correlation = features.T @ features / len(output)
    return len(output) * (correlation - torch.eye(4)).square().sum()


def spread(output: Tensor) -> Tensor:
    """VICReg's kind: the variance of features over the batch."""
    return len(output) * (1 - output.var(0).sqrt()).relu().mean()


class OfWhole(Task):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        self._of = of

    def loss(self, output: Any, batch: Any) -> Tensor:
        return self._of(output)


@pytest.mark.parametrize("of", [decorrelated, spread])
@pytest.mark.parametrize("seed", range(4))
def test_statistics_of_a_batch_are_told_as_a_loss_of_the_whole(of: Callable[[Tensor], Tensor], seed: int) -> None:
    batch = torch.randn(16, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with pytest.raises(TaskError, match=r"depends on the micro-batch as a whole|gives a mean"):
        engine_of(OfWhole(of)).update(batch)


class Contrast(Task):
    """Negatives of the same batch; there is no memory for more than 6 samples, from the second update on."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        if len(output) > 6 and self.now.update == 2:
            raise torch.OutOfMemoryError("no memory for so many")
        scores = output @ output.T
        return -scores.log_softmax(-1).diagonal().sum()


class ContrastCut(Contrast):
    def split(self, batch: Any) -> list[Any]:
        return super().split(batch)


def test_a_loss_that_is_meant_over_the_micro_batch_is_not_cut_for_memory_unless_its_task_says_how() -> None:
    engine = engine_of(Contrast(), check_loss=False)
    engine.update(points())
    with pytest.raises(
        OutOfMemoryError, match=r"`check_loss` is False, .* as a whole \(.*\); say how in `Contrast.split`"
    ):
        engine.update(points())
    engine = engine_of(ContrastCut(), check_loss=False)
    for _ in range(2):
        engine.update(points())
    assert engine.parts.context.cuts.limit is not None


class Detector(nn.Module):
    """As torchvision's: losses while it trains, boxes when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, points: Tensor) -> Any:
        boxes = self.head(points)
        return {"loss_box": boxes.square().sum()} if self.training else [{"boxes": one} for one in boxes]


class Detect(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return output["loss_box"]


def test_a_loss_that_can_not_be_had_in_evaluation_mode_is_said_not_to_be_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of(Detect(), Detector())
    with caplog.at_level(logging.WARNING, logger="evenstep"):
        for _ in range(12):
            engine.update(points())
    (text,) = caplog.messages
    assert text.startswith("`Detect.loss` could not be compared with the losses of halves: in evaluation mode")
    assert "TypeError" in text


class TimeFirst(Task):
    """Sequences [time, samples], of which each has a state that goes from step to step."""

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output[0][..., 0] - batch[1]).square().sum()


class TimeFirstCut(TimeFirst):
    def weight(self, batch: Any) -> float:
        return batch[0].shape[1]

    def split(self, batch: Any) -> list[Any]:
        return [*zip(*(one.chunk(2, dim=1) for one in batch), strict=True)] if batch[0].shape[1] > 1 else [batch]


def test_samples_in_columns_that_were_cut_by_rows_since_there_are_as_many_are_told_as_that() -> None:
    batch = points(16).reshape(4, 4, 2), points(8).reshape(4, 4)
    with pytest.raises(TaskError, match=r"columns of the tensor \[4, 4, 2\], which was cut by rows: .*`split`"):
        engine_of(TimeFirst(), nn.GRU(2, 3)).update(batch)
    assert isinstance(engine_of(TimeFirstCut(), nn.GRU(2, 3)).update(batch), Committed)
