from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def test_a_good_run_is_built_and_tried_and_nothing_is_written(evenstep: Run, recipe: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in recipe.rglob("*")}
    settings = ["--log.writers", '["console", "jsonl", "csv", "tensorboard"]', "--train.ema.decay", "0.9"]
    done = evenstep("check", "run.toml", *settings, "--checkpoint.best.metric", "valid/loss")
    assert done.code == 0, done.err
    assert {path: path.stat().st_mtime_ns for path in recipe.rglob("*")} == before
    assert done.out.splitlines()[0] == "model       Net, 17 parameters, on cpu"
    assert "checked     1 update of 8 samples in 3 micro-batches: train/loss " in done.out


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        (["--train.updates", "0", "--seed", "x"], 2, "2 faults in the configuration"),
        (["--data.train.target", "wrong.py:wide"], 1, "shapes cannot be multiplied"),
        (["--task.target", "wrong.py:NotFinite"], 1, "its gradient is not finite"),
        (["--data.evaluations.valid", '{target = "wrong.py:empty"}'], 2, "`data.evaluations.valid`"),
        (["--data.evaluations.valid", '{target = "wrong.py:Broken", micro_batch_size = 20}'], 1, "sample 13"),
        (["--hooks", '[{target = "wrong.py:Misspelt"}]'], 1, "did you mean `after_update`?"),
    ],
)
def test_what_would_go_wrong_is_found(evenstep: Run, recipe: Path, settings: list[str], code: int, says: str) -> None:
    done = evenstep("check", "run.toml", *settings)
    assert done.code == code
    assert says in done.err
    assert not (recipe / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["--parallel.pipeline", "2", "--parallel.pipeline_schedule", "zb_v", "--parallel.stages_per_rank", "3"],
            "is 3",
        ),
        (["--parallel.pipeline", "3", "--launch.ranks", "4"], "`launch.ranks`"),
        (["--parallel.strategy", "single", "--launch.ranks", "2"], "`launch.ranks`"),
    ],
)
def test_what_ranks_would_refuse_is_refused_before_any_is_started(
    evenstep: Run, recipe: Path, settings: list[str], says: str
) -> None:
    (recipe / "layers.py").write_text("from parts import Net\n\ndef layers():\n    return Net().layers\n")
    done = evenstep("check", "run.toml", "--model.target", "layers.py:layers", *settings)
    assert done.code == 2
    assert says in done.err
    assert done.out == ""
