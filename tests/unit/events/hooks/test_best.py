import math
from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import HookError
from evenstep.events import Best, Bus, EpochEvent, EvaluateEvent, SaveEvent, TrainEvent
from refused import refused


def attached(trainer: Any, **arguments: Any) -> Best:
    hook = Best(**arguments)
    Bus([hook], trainer)
    return hook


def evaluated(update: int, loss: float) -> EvaluateEvent:
    return EvaluateEvent(update=update, name="valid", metrics={"valid/loss": loss})


def saved(folder: Path, update: int) -> SaveEvent:
    return SaveEvent(update=update, path=folder / "checkpoints" / f"step-{update:08d}")


def test_a_save_is_asked_for_at_each_new_best_only(trainer: Any) -> None:
    hook = attached(trainer)
    asked = []
    for update, loss in enumerate([3.0, 3.0, 2.0, 2.5, math.nan, -math.inf, 1.0], start=1):
        trainer.asked.clear()
        hook.after_evaluate(evaluated(update, loss))
        asked.append(trainer.asked == ["save"])
    assert asked == [True, False, True, False, False, False, True]
    assert (hook.best_value, hook.best_update) == (1.0, 7)


def test_the_link_names_the_checkpoint_of_the_best_update_only(trainer: Any) -> None:
    trainer.folder.mkdir()
    hook, link = attached(trainer), trainer.folder / "best"
    hook.after_evaluate(evaluated(10, 2.0))
    hook.after_save(saved(trainer.folder, 10))
    assert link.read_text() == "step-00000010\n"
    hook.after_evaluate(evaluated(20, 3.0))
    hook.after_save(saved(trainer.folder, 20))
    assert link.read_text() == "step-00000010\n"
    assert hook.kept_checkpoints() == ("step-00000010",)


def test_a_checkpoint_that_could_not_be_saved_is_none_of_the_best(trainer: Any) -> None:
    trainer.folder.mkdir()
    hook = attached(trainer)
    for update, loss, path in ((10, 2.0, Path("step-00000010")), (20, 1.0, None), (30, 1.5, None)):
        hook.after_evaluate(evaluated(update, loss))
        hook.before_save(SaveEvent(update=update))
        hook.after_save(SaveEvent(update=update, path=path))
    assert (hook.best_value, hook.kept_checkpoints()) == (2.0, ("step-00000010",))
    trainer.asked.clear()
    hook.after_evaluate(evaluated(40, 1.5))  # better than what there is
    assert trainer.asked == ["save"]


def test_when_a_save_fails_while_the_next_best_is_known_that_one_counts(trainer: Any) -> None:
    trainer.folder.mkdir()
    hook = attached(trainer)
    hook.after_evaluate(evaluated(10, 2.0))
    hook.before_save(SaveEvent(update=10))
    hook.after_evaluate(evaluated(20, 1.0))
    hook.after_save(SaveEvent(update=10, path=None))
    assert hook.kept_checkpoints() == ("step-00000020",)


def test_after_a_resume_a_worse_model_is_not_the_best(trainer: Any) -> None:
    before = attached(trainer)
    before.after_evaluate(evaluated(10, 2.0))
    after = attached(trainer)
    after.load_state_dict(before.state_dict())
    trainer.asked.clear()
    after.after_evaluate(evaluated(20, 2.5))
    assert trainer.asked == []
    assert after.kept_checkpoints() == ("step-00000010",)


def test_a_link_that_a_killed_run_did_not_write_is_written_when_training_begins(trainer: Any) -> None:
    (trainer.folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    hook = attached(trainer)
    hook.load_state_dict({**hook.state_dict(), "best": [[2.0, 10]]})
    hook.before_train(TrainEvent(update=10, updates=100, resumed=True))
    assert (trainer.folder / "best").read_text() == "step-00000010\n"


def test_after_a_rewind_the_link_names_what_is_the_best_then(trainer: Any) -> None:
    hook, link = attached(trainer), trainer.folder / "best"
    saves = [saved(trainer.folder, update) for update in (10, 20)]
    for save, loss in zip(saves, (2.0, 1.0), strict=True):
        before = hook.state_dict()
        save.path.mkdir(parents=True)
        hook.after_evaluate(evaluated(save.update, loss))
        hook.after_save(save)
    hook.load_state_dict(before)  # of update 10; that of 20 is made again, and no better
    hook.before_epoch(EpochEvent(update=10, epoch=0))
    assert link.read_text() == "step-00000010\n"
    for save in saves:
        save.path.rmdir()
    hook.load_state_dict({**hook.state_dict(), "best": []})
    hook.before_epoch(EpochEvent(update=0, epoch=0))
    assert not link.exists()


def test_two_of_them_keep_two_links(trainer: Any) -> None:
    trainer.folder.mkdir()
    low, high = Best(), Best("valid/accuracy", "max", link="best-accuracy")
    bus = Bus([low, high], trainer)
    metrics = {"valid/loss": 1.0, "valid/accuracy": 0.5}
    for hook in (low, high):
        hook.after_evaluate(EvaluateEvent(update=1, name="valid", metrics=metrics))
        hook.after_save(saved(trainer.folder, 1))
    low.after_evaluate(EvaluateEvent(update=2, name="valid", metrics={**metrics, "valid/loss": 0.5}))
    low.after_save(saved(trainer.folder, 2))
    assert (trainer.folder / "best").read_text() == "step-00000002\n"
    assert (trainer.folder / "best-accuracy").read_text() == "step-00000001\n"
    assert bus.kept_checkpoints() == {"step-00000001", "step-00000002"}


def test_the_best_few_are_kept_in_their_order(trainer: Any) -> None:
    hook = attached(trainer, keep=3)
    asked = []
    for update, loss in enumerate([3.0, 5.0, 4.0, 6.0, 3.5, math.nan, 3.5, 2.0], start=1):
        trainer.asked.clear()
        hook.after_evaluate(evaluated(update, loss))
        asked.append(trainer.asked == ["save"])
    assert asked == [True, True, True, False, True, False, True, True]
    assert hook.kept_checkpoints() == ("step-00000008", "step-00000001", "step-00000005")
    again = attached(trainer, keep=3)
    again.load_state_dict(hook.state_dict())
    assert again.kept_checkpoints() == hook.kept_checkpoints()


def test_of_a_metric_of_training_the_saved_updates_count(trainer: Any) -> None:
    trainer.folder.mkdir()
    hook = attached(trainer, metric="train/loss", keep=2)
    hook.before_train(TrainEvent(update=0, updates=9, resumed=False))
    for update, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        trainer.storage.put("train/loss", loss, update=update)
        trainer.storage.settle()
        hook.before_save(SaveEvent(update=update))
        hook.after_save(saved(trainer.folder, update))
    assert hook.kept_checkpoints() == ("step-00000020", "step-00000030")
    assert (trainer.folder / "best").read_text() == "step-00000020\n"
    assert trainer.asked == []


def test_a_metric_of_training_counts_for_no_later_checkpoint_than_that_of_its_update(trainer: Any) -> None:
    trainer.folder.mkdir()
    hook = attached(trainer, metric="train/rare", keep=2)
    trainer.storage.put("train/rare", 1.0, update=10)
    trainer.storage.settle()
    for update in (10, 15, 20):
        hook.before_save(SaveEvent(update=update))
        hook.after_save(saved(trainer.folder, update))
    assert hook.kept_checkpoints() == ("step-00000010",)


def test_without_a_folder_training_does_not_begin(trainer: Any) -> None:
    trainer.folder = None
    with refused(HookError, "Best"):
        attached(trainer).before_train(TrainEvent(update=0, updates=1, resumed=False))


def test_an_evaluation_that_never_comes_is_an_error_when_training_begins(trainer: Any) -> None:
    with pytest.raises(HookError):
        attached(trainer, metric="test/loss").before_train(TrainEvent(update=0, updates=1, resumed=False))
