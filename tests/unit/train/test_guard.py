"""The guard of normalisation: what it says, what it lets pass, and that it leaves nothing behind."""

import logging
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep import Hook, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import LostRankError, TaskError
from evenstep.pipeline import Layers, PipelineModel
from evenstep.precision import Bf16Mixed, Fp16Mixed

SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 3)) for n in range(24)]


class Sums(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return F.cross_entropy(output, batch[1], reduction="sum")


class Means(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return F.cross_entropy(output, batch[1])


def trainer_of(task: Any = None, model: nn.Module | None = None, *, micro: int | None = 4, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    more.setdefault("data", MapData(SAMPLES, global_batch_size=8, micro_batch_size=micro))
    more.setdefault("updates", 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model=model, task=task or Sums(), optimizer=optimizer, device="cpu", **more)


def refused(*args: Any, **more: Any) -> str:
    with pytest.raises(TaskError) as raised:
        trainer_of(*args, **more).train()
    return str(raised.value)


def said(caplog: pytest.LogCaptureFixture, *args: Any, **more: Any) -> list[str]:
    with caplog.at_level(logging.WARNING, "evenstep"):
        trainer_of(*args, **more).train()
    return caplog.messages


def test_a_loss_that_is_a_mean_is_refused_with_both_numbers_and_the_line_to_change() -> None:
    text = refused(Means())
    numbers = re.search(
        r"micro-batch 0 \(4 samples\) is ([\d.]+), but the losses of its two halves .* ([\d.]+): ", text
    )
    assert numbers and float(numbers[2]) == pytest.approx(2 * float(numbers[1]), rel=0.2)
    assert "`Means.loss` gives a mean" in text
    assert 'Return `F.cross_entropy(..., reduction="sum")`, or `Loss.of_mean(mean, count)`' in text


@pytest.mark.parametrize("advice", ["sum", "of_mean", "meant"])
def test_the_advice_for_a_mean_helps(advice: str) -> None:
    class OfMean(Means):
        def loss(self, output: Any, batch: Any) -> Any:
            return Loss.of_mean(super().loss(output, batch), len(batch[1]))

    task = {"sum": Sums, "of_mean": OfMean, "meant": Means}[advice]()
    trainer = trainer_of(task, train=Training(check_loss=advice != "meant"))
    assert trainer.train().update == 2


def test_a_sum_that_is_given_as_a_mean_is_told_as_that_and_not_as_a_loss_of_the_whole_batch() -> None:
    class Multiplied(Sums):
        def loss(self, output: Any, batch: Any) -> Any:
            return Loss.of_mean(super().loss(output, batch), len(batch[1]))

    class Total(Sums):
        def loss(self, output: Any, batch: Any) -> Any:
            return Loss(super().loss(output, batch))

    assert "`Multiplied.loss` gives as a mean what is a sum" in refused(Multiplied())
    assert trainer_of(Total()).train().update == 2  # as the advice says


@pytest.mark.parametrize("first", [[0, 0, 0, 0], [0, 1, 1, 0]])
def test_a_mean_over_class_weights_is_refused_though_the_first_micro_batch_does_not_tell(first: list[int]) -> None:
    class Weighted(Sums):
        def loss(self, output: Any, batch: Any) -> Any:
            return Loss.of_mean(F.cross_entropy(output, batch[1], torch.tensor([1.0, 3.0, 1.0])), len(batch[1]))

    class Counted(Weighted):
        def weight(self, batch: Any) -> Tensor:
            return torch.tensor([1.0, 3.0, 1.0])[batch[1]].sum()

        def loss(self, output: Any, batch: Any) -> Any:
            mean = F.cross_entropy(output, batch[1], torch.tensor([1.0, 3.0, 1.0]))
            return Loss.of_mean(mean, self.weight(batch))  # as the error says

    labels = [*first, 0, 0, 1, 1]
    data = MapData(
        [(x, torch.tensor(label)) for (x, _), label in zip(SAMPLES, labels, strict=False)],
        global_batch_size=8,
        micro_batch_size=4,
        shuffle=False,
    )
    text = refused(Weighted(), data=data)
    assert "the loss of micro-batch 1 (4 samples) is" in text and "must count: `weights[labels].sum()`" in text
    assert trainer_of(Counted(), data=data).train().update == 2


def test_an_evaluation_refuses_a_mean_as_well() -> None:
    data = MapData(SAMPLES, global_batch_size=8, micro_batch_size=4, shuffle=False)
    with pytest.raises(TaskError, match="gives a mean"):
        trainer_of(Means(), evaluations={"valid": data}).evaluate()


def test_a_loss_that_is_another_in_evaluations_is_looked_at_there_once() -> None:
    class Either(Sums):
        evaluated = 0

        def loss(self, output: Any, batch: Any) -> Any:
            if not self.now.is_evaluating:
                return super().loss(output, batch)
            type(self).evaluated += 1
            return self.judged(output, batch)

    class Right(Either):
        judged = Sums.loss

    class Wrong(Either):
        judged = Means.loss

    data = {"valid": MapData(SAMPLES, global_batch_size=8)}
    with pytest.raises(TaskError, match=r"in evaluations: the loss of micro-batch 0 \(8 samples\) .* gives a mean"):
        trainer_of(Wrong(), evaluations=data).train()
    trainer = trainer_of(Right(), evaluations=data)
    trainer.train()
    assert Right.evaluated == 3 + 3  # three batches, and one of them whole and in halves
    trainer.evaluate()
    assert Right.evaluated == 9
    trainer_of(Wrong(), evaluations=data, train=Training(check_loss=False)).train()


def test_one_of_several_tasks_is_refused_by_name() -> None:
    data = Mixture({name: MapData(SAMPLES, global_batch_size=8, micro_batch_size=4) for name in ("good", "bad")})
    assert refused({"good": Sums(), "bad": Means()}, data=data).startswith(
        "task `bad`: the loss of micro-batch 2 (4 sam"
    )


def test_a_mean_over_tokens_is_refused_whatever_the_weight_counts() -> None:
    class Tokens(Task):
        def loss(self, output: Any, batch: Any) -> Any:
            kept = batch[0] > 0
            return (output.sum(1, keepdim=True) - batch[0]).square()[kept].mean()

    assert "`Tokens.loss` gives a mean" in refused(Tokens(), micro=8)


@pytest.mark.parametrize("precision", [Bf16Mixed, Fp16Mixed])
def test_rounding_of_16_bits_is_no_fault_and_hides_none(precision: Any) -> None:
    assert trainer_of(precision=precision()).train().update == 2
    assert "gives a mean" in refused(Means(), precision=precision())


def test_a_sum_whose_terms_cancel_is_no_fault() -> None:
    class Policy(Task):  # the ratio is 1 at first, and advantages add up to nothing
        def loss(self, output: Any, batch: Any) -> Any:
            chosen = output.log_softmax(-1)[:, 0]
            advantage = torch.tensor([1.0, -1.0]).repeat(len(chosen))[: len(chosen)]
            return -(advantage * (chosen - chosen.detach()).exp()).sum()

    assert trainer_of(Policy()).train().update == 2


class Drops(nn.Sequential):
    """A model that ignores `eval()`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5)


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_a_model_that_draws_random_numbers_in_evaluation_is_no_fault(micro: int) -> None:
    assert trainer_of(model=Drops(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), micro=micro).train().update == 2


def test_losses_of_none_and_batches_of_weight_0_and_single_samples_are_no_fault() -> None:
    class Silent(Sums):
        def weight(self, batch: Any) -> float:
            return float((batch[1] > 0).sum())

        def loss(self, output: Any, batch: Any) -> Any:
            kept = batch[1] > 0
            return Loss(F.cross_entropy(output[kept], batch[1][kept], reduction="sum") if kept.any() else None)

    for micro in (1, 2, 3):
        assert trainer_of(Silent(), micro=micro).train().update == 2


class Joined:
    """A batch that only its task knows how to cut."""

    def __init__(self, samples: list[Any]) -> None:
        self.rows, self.num = torch.stack([row for row, _ in samples]), len(samples)

    def to(self, *args: Any, **more: Any) -> "Joined":
        return self


def test_a_count_that_is_not_the_weight_is_refused_also_where_a_micro_batch_can_not_be_cut() -> None:
    class Features(Task):
        def inputs(self, batch: Any) -> Any:
            return batch.rows

        def loss(self, output: Any, batch: Any) -> Any:
            return Loss.of_mean((output.sum(1, keepdim=True) - batch.rows).square().mean(), self.count(batch))

        def count(self, batch: Any) -> int:
            return batch.rows.numel()

    class Samples(Features):
        def count(self, batch: Any) -> int:
            return batch.num

    data = MapData(SAMPLES, global_batch_size=8, micro_batch_size=4, collate=Joined)
    text = refused(Features(), data=data)
    assert "(4 samples) is a mean over 24 units (`Loss.of_mean`), but `Features.weight` gives 4 for it" in text
    assert trainer_of(Samples(), data=data).train().update == 2


def test_a_micro_batch_of_one_sample_is_left_for_the_next_that_can_be_halved() -> None:
    data = MapData(SAMPLES, global_batch_tokens=12, micro_batch_tokens=6, lengths=[6, 6] + [3] * 22, shuffle=False)
    assert "micro-batch 0 (2 samples)" in refused(Means(), data=data, updates=4)


def test_batch_norm_is_said_once_and_only_where_batches_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    (text,) = said(caplog, model=model())
    assert text.startswith("`1` normalises each micro-batch by its own statistics (BatchNorm)")
    caplog.clear()
    assert said(caplog, model=model(), micro=8) == []
    assert said(caplog, model=model(), train=Training(norm_statistics="frozen")) == []


def test_a_hook_on_the_gradient_of_a_parameter_is_said_where_batches_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    def clipped() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model

    (text,) = said(caplog, model=clipped())
    assert text.startswith(
        "`0.weight` and 3 more have a hook (`register_hook`), which gets the gradient of each micro-"
    )
    caplog.clear()
    assert said(caplog, model=clipped(), micro=8) == [] == said(caplog)


def test_an_embedding_that_counts_the_tokens_of_a_micro_batch_is_said_where_batches_are_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def counting() -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(4, 3))

    def tokens(micro: int) -> MapData:
        return MapData(
            [(one[:2].long() % 4, label) for one, label in SAMPLES], global_batch_size=8, micro_batch_size=micro
        )

    (text,) = said(caplog, model=counting(), data=tokens(4))
    assert text.startswith("`0` divides the gradient of a row by how often it is in the micro-batch")
    caplog.clear()
    assert said(caplog, model=counting(), data=tokens(8)) == []


def test_batch_norm_without_running_statistics_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    assert any(
        "BatchNorm" in text for text in said(caplog, model=nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)))
    )


def test_a_metric_given_as_a_mean_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Right(Sums):
        def loss(self, output: Any, batch: Any) -> Any:
            nats = F.cross_entropy(output, batch[1], reduction="none")
            return Loss(
                nats.sum(), metrics={"nats": (nats.mean(), 1), "heat": (2.0, 1), "all": (nats.sum(), len(nats))}
            )

    (text,) = said(caplog, Right())
    assert "gives the metric `nats` as (mean, 1)" in text


@pytest.mark.parametrize(
    "made",
    [
        lambda nats: (nats.square().mean().sqrt() * len(nats), len(nats)),  # a root
        lambda nats: (nats.max() * len(nats), len(nats)),
        lambda nats: (nats.sum(), nats.square().sum().sqrt()),  # over what does not add up
        lambda nats: (float(len(nats)), 1),  # a count
    ],
)
def test_a_metric_that_is_another_number_for_every_cut_is_said_whatever_it_is_made_of(
    caplog: pytest.LogCaptureFixture, made: Callable[[Tensor], Any]
) -> None:
    class Odd(Sums):
        def loss(self, output: Any, batch: Any) -> Any:
            nats = F.cross_entropy(output, batch[1], reduction="none")
            return Loss(nats.sum(), metrics={"odd": made(nats), "nats": (nats.sum(), len(nats)), "none": (0.0, 3)})

    (text,) = said(caplog, Odd())
    assert "gives the metric `odd` as (" in text and "what is logged is another number for every cut" in text


class Leaves(nn.Module):
    """A model whose forward leaves traces of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.history, self.generator = 0, [], torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.history.append(len(x))
        noise = torch.randn(x.shape, generator=self.generator) + random.random() + np.random.rand()
        return self.drop(self.norm(self.linear(x + 0.01 * noise))) + 0.001 * self.seen


class Counts(Sums):
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, output: Any, batch: Any) -> Any:
        self.calls += 1
        batch[1].add_(0)
        return super().loss(output, batch) * (1 + 0.01 * self.calls)


def test_the_guard_leaves_no_trace(tmp_path: Path) -> None:
    def run(*, check_loss: bool) -> Any:
        heard: list[str] = []

        class Hears(Hook):
            def before_microbatch(self, event: Any) -> None:
                heard.append(f"{event.update} {event.microbatch}")

            def before_forward(self, event: Any) -> None:
                heard.append("forward")

            def on_incident(self, event: Any) -> None:
                heard.append(event.kind)

        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model, task = Leaves(), Counts()
        trainer = trainer_of(task, model, hooks=[Hears()], train=Training(check_loss=check_loss), updates=4)
        trainer.train()
        records = [record[:3] for name in trainer.storage.names() for record in trainer.storage.history(name)]
        records = [record for record in records if "perf" not in record[1]]
        return model.state_dict(), (model.seen, model.history, task.calls, heard, records)

    state, traces = run(check_loss=True)
    wanted, wanted_traces = run(check_loss=False)
    assert traces == wanted_traces
    assert all(torch.equal(value, wanted[name]) for name, value in state.items())


class Judges(Sums):
    """Holds networks in a list, and a tensor that its loss writes to in place."""

    def __init__(self) -> None:
        self.judges = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).requires_grad_(False)]
        self.centre = torch.zeros(3)

    def loss(self, output: Any, batch: Any) -> Any:
        with torch.no_grad():
            wanted = self.judges[0](output) - self.centre
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return super().loss(output, batch) + ((output - wanted) ** 2).sum()


def test_networks_in_lists_are_in_evaluation_mode_and_tensors_written_in_place_are_put_back() -> None:
    states: list[Any] = []
    for check_loss in (True, False):
        torch.manual_seed(1)
        task = Judges()
        trainer = trainer_of(
            task, train=Training(check_loss=check_loss), evaluations=MapData(SAMPLES, global_batch_size=8)
        )
        trainer.train()
        states.append([*trainer.model.state_dict().values(), *task.judges[0].state_dict().values()])
        seen = task.judges[0][1].num_batches_tracked
        assert seen == 4 and task.judges[0].training  # two updates of two micro-batches, and no evaluation
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_batch_that_holds_what_has_no_copy_is_looked_at() -> None:
    class Locked:
        def __init__(self, samples: Any) -> None:
            self.x, self.y = (torch.stack(column) for column in zip(*samples, strict=True))
            self.lock = threading.Lock()

    class Locks(Means):
        def weight(self, batch: Any) -> int:
            return len(batch.y)

        def inputs(self, batch: Any) -> Any:
            return batch.x

        def loss(self, output: Any, batch: Any) -> Any:
            return super().loss(output, (None, batch.y))

        def split(self, batch: Any) -> list[Any]:
            samples = list(zip(batch.x, batch.y, strict=True))
            half = (len(samples) + 1) // 2
            return [Locked(samples[:half]), Locked(samples[half:])] if len(samples) > 1 else [batch]

    assert "gives a mean" in refused(Locks(), data=MapData(SAMPLES, global_batch_size=8, collate=Locked))


def test_a_weight_that_is_drawn_in_the_forward_is_no_fault_where_losses_happen_to_add_up() -> None:
    class Draws(Sums):
        late_weight = True

        def loss(self, output: Any, batch: Any) -> Any:
            count = torch.randint(1, 9, ())
            return Loss(output.sum() * 0 + 100.0 * len(batch[1]) + 1e-3 * count, weight=count)

    assert trainer_of(Draws()).train().update == 2


class Small(nn.Module):
    """A device on which a forward without gradients of more than so many samples does not fit either."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.linear, self.room = nn.Linear(6, 3), room

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            raise torch.OutOfMemoryError("injected")
        return self.linear(x)


def test_the_guard_goes_by_what_fits_into_memory_and_never_ends_a_run_for_lack_of_it() -> None:
    assert "a part of micro-batch 0 (4 samples)" in refused(Means(), Small(4), micro=8)
    assert trainer_of(model=Small(4), micro=8).train().update == 2
    assert trainer_of(Means(), Small(1), micro=8).train().update == 2  # single samples have no halves


def test_a_batch_that_is_changed_in_place_is_whole_for_the_update() -> None:
    class Pops(Sums):
        def inputs(self, batch: Any) -> Any:
            return (batch["x"].mul_(2),)

        def loss(self, output: Any, batch: Any) -> Any:
            return F.cross_entropy(output, batch.pop("y"), reduction="sum")

    data = MapData([dict(zip("xy", one, strict=True)) for one in SAMPLES], global_batch_size=8, micro_batch_size=4)
    assert trainer_of(Pops(), data=data).train().update == 2


def test_what_a_task_raises_is_raised_by_the_update() -> None:
    class Breaks(Sums):
        def loss(self, output: Any, batch: Any) -> Any:
            raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        trainer_of(Breaks()).train()


@pytest.mark.parametrize("precision", [None, Bf16Mixed()])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_attention_of_torch_is_compared_as_it_trains(
    reduction: str, precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its shortcut for evaluation gives outputs that are shorter than the inputs, and fails under autocast."""
    words = [torch.arange(1, 2 + n % 7) for n in range(16)]

    def padded(samples: Any) -> Any:
        return {"words": nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            self.embed, self.encode, self.head = nn.Embedding(9, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 9)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.encode(self.embed(words), src_key_padding_mask=words == 0))

    class Words(Task):
        def weight(self, batch: Any) -> Any:
            return (batch["words"] != 0).sum()

        def loss(self, output: Any, batch: Any) -> Any:
            logits = output.flatten(0, 1).float()
            return F.cross_entropy(logits, batch["words"].flatten(), ignore_index=0, reduction=reduction)

    data = MapData(words, global_batch_size=16, micro_batch_size=8, collate=padded, shuffle=False)
    trainer = trainer_of(Words(), Model(), data=data, precision=precision, updates=1)
    if reduction == "mean":
        with pytest.raises(TaskError, match="gives a mean"):
            trainer.train()
    else:
        assert trainer.train().update == 1
    assert caplog.messages == []


@pytest.mark.parametrize(("error", "advised"), [(ValueError("a bug"), True), (LostRankError("rank 1 is gone"), False)])
def test_who_is_lost_in_the_first_look_is_not_told_to_leave_it_out(error: Exception, advised: bool) -> None:
    class Raises(Sums):
        def loss(self, output: Any, batch: Any) -> Any:
            raise error

    layers = Layers.of([nn.Linear(6, 8), nn.Linear(8, 3)])
    with pytest.raises(type(error)) as raised:
        trainer_of(Raises(), PipelineModel(layers)).train()
    notes = getattr(raised.value, "__notes__", [])
    assert any("`Task.split` cuts it: override that" in note and "check_loss" in note for note in notes) == advised


class Boxes(Sums):
    """Only what has boxes (class 0) is counted, but images without boxes have a loss too."""

    def weight(self, batch: Any) -> float:
        return float((batch[1] == 0).sum())


class LateBoxes(Boxes):
    late_weight = True

    def loss(self, output: Any, batch: Any) -> Any:
        return Loss(super().loss(output, batch), weight=self.weight(batch))


class Samples(Boxes):
    def weight(self, batch: Any) -> float:
        return float(len(batch[1]))


def ordered(micro: int) -> MapData:
    samples = sorted(SAMPLES, key=lambda one: int(one[1]))
    return MapData(samples, global_batch_size=6, micro_batch_size=micro, shuffle=False)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_micro_batch_of_weight_0_that_has_a_loss_is_refused_when_the_first_one_comes(
    several: bool, staged: bool
) -> None:
    task = {"box": Boxes()} if several else Boxes()
    data = Mixture({"box": ordered(2)}) if several else ordered(2)
    model = PipelineModel(Layers.of([nn.Linear(6, 8), nn.Linear(8, 3)])) if staged else None
    trainer = trainer_of(task, model, data=data, updates=4)
    with pytest.raises(TaskError, match="is 0, so it is not run, but its loss is") as raised:
        trainer.train()
    assert trainer.progress.update == 1  # of all batches of the first one there are boxes
    assert ("task `box`: the weight of micro-batch 1 (2 samples)" in str(raised.value)) is several
    assert "set `late_weight = True` and return `Loss(total, weight=count)`" in str(raised.value)


@pytest.mark.parametrize("advice", ["late", "all", "meant"])
def test_the_advice_for_a_loss_of_weight_0_helps(advice: str) -> None:
    task = {"late": LateBoxes, "all": Samples, "meant": Boxes}[advice]()
    cuts = [trainer_of(task, data=ordered(micro), train=Training(check_loss=advice != "meant")) for micro in (1, 6)]
    assert [one.train().update for one in cuts] == [2, 2]
    assert all(map(torch.allclose, *[one.model.parameters() for one in cuts])) is (advice != "meant")
