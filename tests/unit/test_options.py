"""The option objects of a trainer, and the arguments that it had before there were any."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import evenstep
from evenstep import Checkpointing, Failures, Logging, LossSpikes, Skip, Training
from evenstep.errors import ArgumentError
from evenstep.events import WRITERS
from evenstep.options import OPTIONS, NonFinite, WriterName
from evenstep.train.failures import FAILURE_POLICIES
from evenstep.train.old_arguments import OLD_ARGUMENTS
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


OLD_VALUES: dict[str, Any] = {
    "clip_norm": 0.5,
    "ema": evenstep.Ema(decay=0.5),
    "coefficients": {"a": 2.0},
    "combine": "pc_grad",
    "norm_statistics": "frozen",
    "channels_last": True,
    "check_loss": False,
    "settle_every_updates": 3,
    "fit_memory": True,
    "keep_checkpoints": 7,
    "keep_every_updates": 10,
    "asynchronous_saves": False,
    "config": {"lr": 0.1},
    "on_non_finite": Skip(),
    "on_out_of_memory": "stop",
    "loss_spikes": LossSpikes(),
    "max_skipped_samples": 7,
    "on_hook_error": "continue",
    "log_every_updates": 3,
    "writers": ("csv",),
}


def test_every_old_argument_has_a_row() -> None:
    assert OLD_VALUES.keys() == OLD_ARGUMENTS.keys()


@pytest.mark.parametrize("old", OLD_VALUES)
def test_an_old_argument_is_taken_with_a_warning_that_says_what_to_write(
    old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, Any] = {}
    checks = "evenstep.train.checks.arguments"
    monkeypatch.setattr(f"{checks}.check_engine_arguments", lambda **asked: built.update(asked))
    monkeypatch.setattr(f"{checks}.check_trainer_arguments", lambda **asked: (built.update(asked), 1 / 0))
    argument, _, field = OLD_ARGUMENTS[old].partition(".")
    name = OPTIONS[argument].__name__
    with (
        pytest.warns(DeprecationWarning, match=rf"`{old}=…` is called `{argument}={name}\({field}=…\)` now"),
        pytest.raises(ZeroDivisionError),
    ):
        trainer(**{old: OLD_VALUES[old]})
    assert built[argument] == OPTIONS[argument](**{field: OLD_VALUES[old]})


def test_old_arguments_of_one_option_go_into_one_object(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning) as warned:
        old = trainer(
            folder=tmp_path, keep_checkpoints=1, asynchronous_saves=False, on_non_finite=None, loss_spikes=None
        )
    assert [str(one.message).split("=")[0] for one in warned] == [
        *("`keep_checkpoints", "`asynchronous_saves", "`on_non_finite", "`loss_spikes")
    ]
    assert warned[0].filename == __file__
    old.train()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_policy_that_goes_back_needs_two_checkpoints(tmp_path: Path) -> None:
    kept = Checkpointing(keep_last=1)
    with pytest.raises(ArgumentError, match=r'`non_finite` is "rewind", which goes back .* `keep_last` is 1'):
        trainer(folder=tmp_path, checkpoint=kept, failures=Failures(non_finite="rewind"))
    with pytest.raises(ArgumentError, match="`loss_spike` is LossSpikes, which goes back"):
        spikes = LossSpikes(evenstep.Rewind())
        trainer(folder=tmp_path, checkpoint=kept, failures=Failures(loss_spike=spikes))


def test_an_old_argument_beside_its_option_is_an_error() -> None:
    with pytest.raises(
        ArgumentError, match=r"`clip_norm` and `train` are both given; write `train=Training\(clip_norm=…\)`"
    ):
        trainer(clip_norm=1.0, train=Training())


def test_a_trainer_takes_few_arguments() -> None:
    import inspect

    assert len(inspect.signature(evenstep.Trainer).parameters) <= 18
