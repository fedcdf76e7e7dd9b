"""The option objects of a trainer, and the arguments that it had before there were any."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import evenstep
from evenstep import Checkpointing, Failures, Logging, LossSpikes, Training
from evenstep.errors import ArgumentError
from evenstep.events import WRITERS
from evenstep.options import NonFinite, WriterName
from evenstep.train.failures import FAILURE_POLICIES
from evenstep.train.resolve import policies_of


class Line(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


def trainer(**more: Any) -> evenstep.Trainer:
    model = nn.Linear(1, 1)
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    return evenstep.Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=evenstep.MapData(pairs, global_batch_size=4),
        updates=2,
        device="cpu",
        **more,
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            lambda: Training(clip_norm=0.0),
            "`clip_norm` must be a finite number above 0, but is 0.0; None does not clip.",
        ),
        (lambda: Logging(every_updates=0), "`every_updates` must be a whole number of at least 1, but is 0."),
        (lambda: Checkpointing(keep_last=-1), "`keep_last` must be a whole number of at least 0, but is -1."),
        (lambda: Failures(non_finite="skp"), "`non_finite` must be one of stop, skip, .*, but is 'skp'; is it 'skip'?"),  # type: ignore[arg-type]
        (lambda: Failures(non_finite=None), "`non_finite` must be one of stop, .*, but is 'None'"),  # type: ignore[arg-type]
    ],
    ids=["clip_norm", "every_updates", "keep_last", "non_finite", "None"],
)
def test_an_option_that_cannot_be_is_refused_where_it_is_constructed(options: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        options()


@pytest.mark.parametrize(
    ("option", "name"),
    [
        (Failures, "spike_window_updates"),
        (Failures, "spike_threshold"),
        (Failures, "max_rewinds"),
        (Failures, "max_skipped_samples"),
        (Logging, "every_updates"),
    ],
)
def test_a_number_that_must_be_given_is_not_none(option: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"`{name}` must be .*, but is None"):
        option(**{name: None})


def test_options_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Logging().every_updates = 3  # type: ignore[misc]


def test_the_names_that_options_take_are_those_of_the_tables() -> None:
    assert set(get_args(NonFinite)) == set(FAILURE_POLICIES)
    assert set(get_args(WriterName)) == set(WRITERS)


def test_a_spike_is_looked_for_as_the_options_say() -> None:
    assert policies_of(Failures(loss_spike="ignore")).spikes is None
    spikes = policies_of(Failures(loss_spike="rewind", spike_window_updates=16)).spikes
    assert spikes is not None
    assert (spikes.window_updates, type(spikes.policy).__name__) == (16, "Rewind")
    mine = LossSpikes(window_updates=32)
    assert policies_of(Failures(loss_spike=mine)).spikes is mine


def test_a_policy_that_goes_back_needs_two_checkpoints(tmp_path: Path) -> None:
    kept = Checkpointing(keep_last=1)
    with pytest.raises(ArgumentError, match=r'`non_finite` is "rewind", which goes back .* `keep_last` is 1'):
        trainer(folder=tmp_path, checkpoint=kept, failures=Failures(non_finite="rewind"))
    with pytest.raises(ArgumentError, match="`loss_spike` is LossSpikes, which goes back"):
        spikes = LossSpikes(evenstep.Rewind())
        trainer(folder=tmp_path, checkpoint=kept, failures=Failures(loss_spike=spikes))


def test_a_trainer_takes_few_arguments() -> None:
    import inspect

    assert len(inspect.signature(evenstep.Trainer).parameters) <= 19
