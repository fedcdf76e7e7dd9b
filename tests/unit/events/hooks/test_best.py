import math
from pathlib import Path
from typing import Any

import pytest

from evenstep.events import Best, Bus, EpochEvent, EvaluateEvent, SaveEvent, TrainEvent


def attached(trainer: Any, **arguments: Any) -> Best:
    hook = Best(**arguments)
    Bus([hook], trainer)
    return hook


def evaluated(update: int, loss: float) -> EvaluateEvent:
    return EvaluateEvent(update=update, name="valid", metrics={"valid/loss": loss})


def saved(folder: Path, update: int) -> SaveEvent:
    return SaveEvent(update=update, path=folder / "checkpoints" / f"step-{update:08d}")


def link_of(trainer: Any) -> str:
    return (trainer.folder / "best").read_text()


@pytest.mark.parametrize(
    ("keep", "losses", "asks", "kept"),
    [
        (1, [3.0, 3.0, 2.0, 2.5, math.nan, -math.inf, 1.0], [1, 3, 7], [7]),
        (3, [3.0, 5.0, 4.0, 6.0, 3.5, math.nan, 3.5, 2.0], [1, 2, 3, 5, 7, 8], [8, 1, 5]),
    ],
)
def test_a_save_is_requested_for_each_of_the_best(
    trainer: Any, keep: int, losses: list[float], asks: list[int], kept: list[int]
) -> None:
    hook = attached(trainer, keep=keep)
    asked: list[int] = []
    for update, loss in enumerate(losses, start=1):
        hook.after_evaluate(evaluated(update, loss))
        asked += [update] * len(trainer.asked)
        trainer.asked.clear()
    assert asked == asks
    assert hook.kept_checkpoints() == tuple(f"step-{update:08d}" for update in kept)
    assert hook.best_value == losses[kept[0] - 1]
    again = attached(trainer, keep=keep)
    again.load_state_dict(hook.state_dict())
    assert again.kept_checkpoints() == hook.kept_checkpoints()
    again.after_evaluate(evaluated(20, 9.0))  # worse than those before the resume
    assert trainer.asked == []


def test_a_checkpoint_that_was_not_saved_is_none_of_the_best(trainer: Any) -> None:
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
    hook.before_save(SaveEvent(update=40))
    hook.after_evaluate(evaluated(50, 1.0))  # while the save of update 40 is under way
    hook.after_save(SaveEvent(update=40))
    assert hook.kept_checkpoints() == ("step-00000050",)


def test_the_link_is_corrected_after_a_kill_and_after_a_rewind(trainer: Any) -> None:
    hook = attached(trainer)
    saves = [saved(trainer.folder, update) for update in (10, 20)]
    states: list[Any] = []
    for save, loss in zip(saves, (2.0, 1.0), strict=True):
        states.append(hook.state_dict())
        assert save.path is not None
        save.path.mkdir(parents=True)
        hook.after_evaluate(evaluated(save.update, loss))
        hook.after_save(save)
    hook.load_state_dict(states[1])
    hook.before_epoch(EpochEvent(update=10, epoch=0))
    assert link_of(trainer) == "step-00000010\n"
    (trainer.folder / "best").unlink()
    hook.before_train(TrainEvent(update=10, updates=100, resumed=True))
    assert link_of(trainer) == "step-00000010\n"
    for save in saves:
        assert save.path is not None
        save.path.rmdir()
    hook.load_state_dict(states[0])
    hook.before_epoch(EpochEvent(update=0, epoch=0))
    assert not (trainer.folder / "best").exists()
