"""`--limit_batches`: little of the data, said so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]

HOOK = """
import json
from evenstep import Hook

class Seen(Hook):
    def before_train(self, event):
        self.trained, self.evaluated = [], []

    def after_microbatch(self, event):
        seen = self.trained if self.trainer.model.training else self.evaluated
        seen.append(len(event.batch[0]))

    def after_train(self, event):
        (self.trainer.folder / "seen.json").write_text(json.dumps([self.trained, self.evaluated]))
"""


def test_a_limit_ends_each_epoch_and_each_evaluation_early(evenstep: Run, recipe: Path) -> None:
    (recipe / "seen.py").write_text(HOOK)
    hooks = ["--hooks", '[{target = "seen.py:Seen"}]', "--train.check_loss", "false"]
    done = evenstep("train", "run.toml", *hooks, "--limit_batches", "2")
    assert done.code == 0, done.err
    trained, evaluated = json.loads((recipe / "runs" / "tiny" / "seen.json").read_text())
    assert len(trained) == 6 * 3  # updates, of three micro-batches
    assert evaluated == [3, 3] * 2  # two of six batches, twice
    assert "run         6 updates (3 epochs of 2 updates), precision 32-true, seed 42" in done.out.splitlines()
