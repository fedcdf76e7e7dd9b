from typing import Any

from evenstep.events import Bus, EarlyStop, EvaluateEvent


def attached(trainer: Any, **arguments: Any) -> EarlyStop:
    hook = EarlyStop(**arguments)
    Bus([hook], trainer)
    return hook


def evaluate(hook: EarlyStop, *losses: float, first_update: int = 1) -> None:
    for update, loss in enumerate(losses, first_update):
        hook.after_evaluate(EvaluateEvent(update=update, name="valid", metrics={"valid/loss": loss}))


def test_it_stops_after_so_many_evaluations_in_a_row_without_a_better_one(trainer: Any) -> None:
    hook = attached(trainer, patience_evaluations=2)
    evaluate(hook, 3.0, 3.5, 2.0, 2.0)
    assert trainer.asked == []
    evaluate(hook, 2.0, first_update=5)
    assert trainer.asked == ["stop: `valid/loss` did not improve in 2 evaluations (the best is 2)"]


def test_a_gain_that_is_not_above_min_delta_is_none(trainer: Any) -> None:
    hook = attached(trainer, patience_evaluations=2, min_delta=0.5)
    evaluate(hook, 3.0, 2.5, 2.0)
    assert trainer.asked == []
    evaluate(hook, 1.5, 1.75, first_update=4)
    assert len(trainer.asked) == 1


def test_waiting_goes_on_after_a_resume(trainer: Any) -> None:
    before = attached(trainer, patience_evaluations=3)
    evaluate(before, 1.0, 2.0, 2.0)
    after = attached(trainer, patience_evaluations=3)
    after.load_state_dict(before.state_dict())
    evaluate(after, 2.0, 2.0, first_update=3)  # the first of them is known
    assert len(trainer.asked) == 1


def test_parameters_that_are_evaluated_again_count_once(trainer: Any) -> None:
    hook = attached(trainer, patience_evaluations=2)
    evaluate(hook, 1.0, 2.0)
    for _ in range(3):
        evaluate(hook, 2.0, first_update=2)  # by hand, after training has ended
    assert trainer.asked == []
