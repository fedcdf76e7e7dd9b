"""Evaluations and predictions that fail on one rank, outside of training."""

from pathlib import Path

import pytest
from scripts import ended, started

SCRIPT = """
import sys, torch
from time import monotonic
from torch import nn
from evenstep import MapData, Task, Trainer
from evenstep.errors import LostRankError
from evenstep.parallel import Ddp, Processes

torch.set_num_threads(1)
group = Processes(torch.device("cpu"), timeout_s=60)

class Fit(Task):
    def loss(self, output, batch):
        if sys.argv[1] == "evaluate" and self.now.is_evaluating and group.rank == 1:
            raise KeyError("boom")
        return ((output - batch[1]) ** 2).sum()
    def predict(self, output, batch):
        if group.rank == 1:
            raise KeyError("boom")
        return output

model = nn.Linear(1, 1)
pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
data = MapData(pairs, global_batch_size=4, micro_batch_size=2)
trainer = Trainer(model=model, task=Fit(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01), data=data,
                  evaluations=data, updates=2, device="cpu", strategy=Ddp(group))
began = monotonic()
try:
    trainer.evaluate() if sys.argv[1] == "evaluate" else trainer.predict(data)
except LostRankError as error:
    print(round(monotonic() - began), error, flush=True)
except KeyError as error:
    print("mine:", error, flush=True)
"""


@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_the_others_learn_at_once_why_one_rank_can_not_go_on(what: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    first, second = ended([*started(script, what, ranks=range(2), world=2)], 100)
    assert second.out.strip() == "mine: 'boom'", second
    seconds, said = first.out.strip().split(maxsplit=1)
    assert int(seconds) < 20, first  # and not the 60 of the group
    assert "rank 1 failed before the first update: KeyError: 'boom'" in said
