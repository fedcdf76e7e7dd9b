"""Unequal numbers of tokens on two real processes: a loop as it is usually written, beside evenstep.

The loop wraps the model in torch's DDP with a correct `no_sync` and divides each micro-batch's mean by the number of
micro-batches. That is a mean of means, which is another gradient than the mean over all tokens. Both are held against
one process in float64 that takes the whole global batch at once.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import ended, started
from torch import nn
from torch.nn import functional

SCRIPT = """
import json, os, sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
import evenstep
from evenstep.parallel import Ddp, Processes

UPDATES, MICROBATCHES, IGNORED = {updates}, 4, -100
torch.set_num_threads(1)
group = Processes(torch.device("cpu"), timeout_s=60)
{made}
samples = sentences()

def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

class Words(evenstep.Task):
    def weight(self, batch):
        return (batch[1] != IGNORED).sum()
    def loss(self, output, batch):
        return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")

def evenly():
    model = made()
    trainer = evenstep.Trainer(
        model=model, task=Words(), optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data=evenstep.MapData(samples, global_batch_size=8, micro_batch_size=2, shuffle=False),
        updates=UPDATES, device="cpu", strategy=Ddp(group, reduction="fast"),
    )
    trainer.train()
    return flat(model)

def as_usual():
    model = made()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    mine = range(group.rank * MICROBATCHES // 2, (group.rank + 1) * MICROBATCHES // 2)
    for update in range(UPDATES):
        for place, microbatch in enumerate(mine):
            first = (update * 8 + microbatch * 2) % len(samples)
            words, targets = (torch.stack(part) for part in zip(*samples[first : first + 2]))
            last = place == len(mine) - 1
            with nullcontext() if last else wrapped.no_sync():
                loss = functional.cross_entropy(wrapped(words).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
                (loss / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)

results = {{"usual": as_usual(), "evenstep": evenly()}}
everybody = group.gather(results)
assert everybody[0] == everybody[1], "the ranks ended at different parameters"
if group.rank == 0:
    print(json.dumps(results))
group.close()
"""
MADE = '''
def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11))

def sentences():
    """32 sentences of up to 12 words; of each second pair all but the first word are padding."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(32):
        words = torch.randint(11, (12,), generator=generator)
        targets = (words * words + 1) % 11
        targets[1 if number // 2 % 2 else 12 - number % 3 :] = -100
        samples.append((words, targets))
    return samples
'''
UPDATES = 50


def exact() -> torch.Tensor:
    """One process, float64, each global batch whole."""
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(MADE, names)
    model, samples = names["made"]().double(), names["sentences"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for update in range(UPDATES):
        first = update * 8 % len(samples)
        words, targets = (torch.stack(part) for part in zip(*samples[first : first + 8], strict=True))
        functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Relative distance of the parameters after 50 updates to the exact ones."""
    script: Path = tmp_path_factory.mktemp("unequal") / "script.py"
    script.write_text(SCRIPT.format(updates=UPDATES, made=MADE))
    scripts = ended(started(script, ranks=range(2), world=2))
    assert [end.code for end in scripts] == [0, 0], scripts
    wanted = exact()
    ends = {name: torch.tensor(end, dtype=torch.float64) for name, end in json.loads(scripts[0].out).items()}
    return {name: float((end - wanted).norm() / wanted.norm()) for name, end in ends.items()}


def test_the_usual_loop_ends_elsewhere(differences: dict[str, float]) -> None:
    assert differences["usual"] > 1e-2


def test_evenstep_ends_where_one_process_does(differences: dict[str, float]) -> None:
    assert differences["evenstep"] <= 1e-6
