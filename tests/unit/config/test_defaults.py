"""What a configuration would say if nothing had been set."""

from evenstep.config.keys import completed, defaults_of

RUN = {
    "name": "tiny",
    "model": {"target": "model.py:Net", "args": {"width": 3}},
    "task": {"target": "task.py:Fit"},
    "optimizer": {"name": "SGD", "lr": 0.5},
    "lr_schedule": {"kind": "cosine", "end_factor": 0.25},
    "data": {"global_batch_size": 8, "train": {"target": "data.py:rows"}},
    "train": {"updates": 5, "precision": "bf16-mixed"},
    "log": {"every_updates": 3, "writers": ["csv"]},
}


def test_every_key_with_a_default_has_it_whatever_was_set() -> None:
    found = defaults_of(RUN)
    assert found["train"]["precision"] == "32-true"
    assert found["log"] == {"every_updates": 10, "writers": ["console", "jsonl"]}
    assert found["lr_schedule"]["end_factor"] != 0.25  # of the kind that was set
    assert found["failures"]["non_finite"] == "stop"  # of a table that was left out


def test_what_must_be_set_and_arguments_have_no_default() -> None:
    found = defaults_of(RUN)
    assert "name" not in found
    assert "model" not in found
    assert "updates" not in found["train"]
    assert "lr" not in found["optimizer"]


def test_tables_are_completed_by_their_defaults() -> None:
    found = completed(RUN)
    assert found["log"] == {"every_updates": 3, "writers": ["csv"]}
    assert found["lr_schedule"] == {"kind": "cosine", "warmup_updates": 0, "end_factor": 0.25}
    assert found["model"] == RUN["model"]
    assert completed(found) == found
