"""What people bring along from other trainers: what would have no effect here is refused, with what to write."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

import evenstep
from evenstep import Best, Checkpointing, EarlyStop, Evaluate, Hook, Logging, MapData, Plateau, Training
from evenstep.data import FirstBatches
from evenstep.errors import ArgumentError, EvenstepError, HookError
from evenstep.events import Save
from evenstep.other_trainers import ATTRIBUTES

DRAWN = torch.Generator().manual_seed(0)
PAIRS = [(torch.randn(3, generator=DRAWN), torch.randn(1, generator=DRAWN)) for _ in range(12)]


class Line(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return (output - batch[1]).square().sum()


def trainer_of(**given: Any) -> evenstep.Trainer:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given = {"updates": 6, "device": "cpu", "log": Logging(writers=()), **given}
    return evenstep.Trainer(
        model=model, task=Line(), optimizer=optimizer, **{"data": MapData(PAIRS, global_batch_size=4), **given}
    )


class Asks(Hook):
    def after_update(self, event: Any) -> None:
        self.trainer.request_evaluate()


FOLLOWS: dict[str, Any] = {
    "EarlyStop": lambda: {"hooks": [EarlyStop(patience_evaluations=1, min_delta=1e9)]},
    "Plateau": lambda: {"lr_schedule": Plateau(patience_evaluations=1), "hooks": []},
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_follows_evaluations_is_refused_where_nothing_asks_for_any(name: str) -> None:
    """Lightning evaluates after each epoch without being asked."""
    evaluations = MapData(PAIRS, global_batch_size=4, num_epochs=1)
    says = rf"`{name}`: `metric` is `valid/loss`, which is followed .* nothing asks .* `Evaluate\(every_updates=…\)`"
    with pytest.raises(HookError, match=says):
        trainer_of(evaluations=evaluations, **FOLLOWS[name]()).train()
    for asks in (Evaluate(every_epochs=1), Asks()):
        given = FOLLOWS[name]()
        given["hooks"].append(asks)
        result = trainer_of(evaluations=evaluations, **given).train()
        assert result.outcome == ("stopped" if name == "EarlyStop" else "done")


def test_two_hooks_that_keep_the_best_need_two_links(tmp_path: Path) -> None:
    given: dict[str, Any] = {"evaluations": DataLoader(PAIRS, 4), "folder": tmp_path}
    with pytest.raises(ArgumentError, match=r"two hooks `Best` have the link `best`, .*link='best-accuracy'"):
        trainer_of(hooks=[Best("valid/loss", "max")], checkpoint=Checkpointing(best=Best("valid/loss")), **given)
    trainer_of(hooks=[Best("valid/loss"), Best("valid/loss", "max", link="worst")], **given)


@pytest.mark.parametrize("link", ["latest", "status.json", "checkpoints"])
def test_the_link_of_the_best_is_no_other_file_of_the_run(link: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"evaluations": DataLoader(PAIRS, 4), "folder": tmp_path}
    with pytest.raises(ArgumentError, match=rf"has the link `{link}`, which is the name of something else that a run"):
        trainer_of(hooks=[Best("valid/loss", link=link)], **given)
    with pytest.raises(ArgumentError, match=r"`link` must be the name of a file in the run folder, but is '\.\.'"):
        Best("valid/loss", link="..")


@pytest.mark.parametrize("asked", [{"every_updates": 3}, {"every_epochs": 1}])
def test_periods_of_saves_that_a_hook_would_take_the_place_of_are_refused(asked: Any, tmp_path: Path) -> None:
    (name,) = asked
    with pytest.raises(ArgumentError, match=rf"`checkpoint` has `{name}={asked[name]}`, which would have no effect"):
        trainer_of(hooks=[Save(every_updates=2)], checkpoint=Checkpointing(**asked), folder=tmp_path)
    trainer_of(hooks=[Save(every_updates=2)], checkpoint=Checkpointing(), folder=tmp_path)


def test_that_not_all_must_fit_is_written_as_partial(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(ArgumentError, match=r"has no argument `strict`; write `partial=True`, which is `strict=False`"):
        evenstep.load_weights(nn.Linear(3, 1), tmp_path / "a.pt", strict=False)  # type: ignore[call-arg]


def test_the_best_checkpoint_is_taken_by_the_file_that_names_it(tmp_path: Path) -> None:
    hooks = [Evaluate(every_updates=1), Best("valid/loss", "max")]  # the first, as it falls
    evaluations = DataLoader(PAIRS, 12)
    trainer = trainer_of(evaluations=evaluations, folder=tmp_path, hooks=hooks)
    trainer.train()
    taken = nn.Linear(3, 1)
    evenstep.load_weights(taken, tmp_path / "best")
    assert not torch.equal(taken.weight, trainer.model.weight)
    again = trainer_of(evaluations=evaluations, updates=1)
    again.resume(tmp_path / "best")
    assert again.progress.update == 1
    assert torch.equal(taken.weight, again.model.weight)


def test_the_first_batches_of_a_loader_are_taken_as_the_loader_is() -> None:
    loader = DataLoader(PAIRS, 4)
    assert trainer_of(data=FirstBatches(loader, 2), updates=None, epochs=3).train().update == 6
    with pytest.raises(ArgumentError, match=r"`data` must be evenstep's `Data`.* or a `DataLoader`, but is a dataset"):
        FirstBatches(PAIRS, 2)  # pyright: ignore[reportArgumentType]


class Module:
    def train_dataloader(self) -> Any:
        return DataLoader(PAIRS, 4)


class Callback:
    def on_train_epoch_end(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("data", Module(), r"a Module, which makes loaders; write `data=module.train_dataloader\(\)` after its"),
        ("evaluations", {"valid": Module()}, r"=module.val_dataloader\(\)` after its `prepare_data\(\)` and `setup"),
        ("hooks", [Callback()], r"but holds a Callback; write a subclass with the methods that it needs"),
        ("log", Logging(writers=[Callback()]), r"but holds a Callback; .* or give one by name, 'csv'"),  # pyright: ignore
        ("precision", "64-true", r"'32-true' computes in the format that the parameters have, .*`model.double\(\)`"),
        ("strategy", "ddp_spawn", "but is 'ddp_spawn'; is it 'ddp'"),
        ("device", "gpu", "`device` must be 'auto', 'cpu' or .*, but is 'gpu': torch calls it 'cuda'"),
    ],
)
def test_what_another_trainer_takes_is_refused_with_what_to_write(argument: str, value: Any, said: str) -> None:
    with pytest.raises(EvenstepError, match=said):
        trainer_of(**{argument: value})


def test_a_model_in_float64_is_trained_in_float64_as_that_error_says() -> None:
    model = nn.Linear(3, 1).double()
    pairs = [(x.double(), y.double()) for x, y in PAIRS]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = MapData(pairs, global_batch_size=4)
    given: dict[str, Any] = {"log": Logging(writers=()), "train": Training(clip_norm=1.0), "device": "cpu"}
    evenstep.Trainer(model=model, task=Line(), optimizer=optimizer, data=data, updates=2, **given).train()
    assert model.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fit", r"`trainer.train\(\)`"),
        ("test", r"`trainer.evaluate\(\)`"),
        ("global_step", "`trainer.progress.update`"),
        ("resume_or_load", r"`trainer.resume\(\)`"),
        ("register_hooks", r"`Trainer\(hooks=…\)`"),
        ("run_step", "`update` of an `evenstep.Engine`"),
    ],
)
def test_another_trainers_method_is_answered_by_ours(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"'Trainer' object has no attribute '{name}'; here it is {meant}"):
        getattr(trainer_of(), name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("step", r"`engine.update\(\*microbatches\)`, which does forwards, backwards"),
        ("backward", r"`engine.update\(\*microbatches\)`"),
        ("clip_grad_norm_", r"`Training\(clip_norm=…\)`"),
        ("save_checkpoint", r"`torch.save\(engine.state_dict\(\), path\)`"),
        ("unwrap_model", "`engine.model`"),
    ],
)
def test_a_method_of_what_others_prepare_is_answered_by_the_engines(name: str, meant: str) -> None:
    model = nn.Linear(3, 1)
    engine = evenstep.Engine(model, Line(), torch.optim.SGD(model.parameters(), lr=0.05), device="cpu")
    with pytest.raises(AttributeError, match=f"'Engine' object has no attribute '{name}'; here it is {meant}"):
        getattr(engine, name)


def test_no_name_that_is_answered_so_is_one_of_ours() -> None:
    model = nn.Linear(3, 1)
    engine = evenstep.Engine(model, Line(), torch.optim.SGD(model.parameters(), lr=0.05), device="cpu")
    for one in (trainer_of(), engine):
        theirs = " ".join(ATTRIBUTES[type(one).__name__].values()).split()
        assert len(set(theirs)) == len(theirs)
        assert not {*theirs} & {*dir(one)}


def test_an_engine_goes_on_from_what_is_saved_and_loaded_as_that_says(tmp_path: Path) -> None:
    def engine() -> evenstep.Engine:
        model = nn.Linear(3, 1)
        return evenstep.Engine(model, Line(), torch.optim.AdamW(model.parameters(), lr=0.05), device="cpu")

    first, second = engine(), engine()
    batches = [default_collate(PAIRS[at : at + 4]) for at in range(0, 12, 4)]
    first.update(batches[0])
    torch.save(first.state_dict(), tmp_path / "engine.pt")
    second.load_state_dict(torch.load(tmp_path / "engine.pt"))
    for one in (first, second):
        one.update(*batches[1:])
    assert torch.equal(first.model.weight, second.model.weight)


@pytest.mark.parametrize("word", ["last", "best"])
def test_words_of_lightning_for_a_checkpoint_are_answered_by_what_goes_on_here(word: str, tmp_path: Path) -> None:
    says = rf"was given '{word}'; `trainer.resume\(\)` goes on from the newest .*, and 'RUN_FOLDER/best' is a path\."
    with pytest.raises(ArgumentError, match=says):
        trainer_of(folder=tmp_path).resume(word)
