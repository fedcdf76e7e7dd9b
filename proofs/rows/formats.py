"""Each number format: one sha256 over cuts, ranks and stages, also when killed and resumed; and how far from float64.

The reference in float64 shares no code with the engine: plain SGD on whole global batches. A gradient on its way
through the model is rounded in each of at most 8 products and sums in a row, each by at most the unit roundoff u of the
format, so the way that the parameters go is off by 8·u of itself. Without master weights each update is rounded once
more into the weights, at random: √updates · u of the weights on top. In float32, u is that of its sums, over up to 256
terms.
"""

import math
import os
import subprocess
import sys
import tempfile
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

import evenstep
from rows.cutting import CLIP, GLOBAL_BATCH, SAMPLES, WORDS, Words, loss_sum, samples
from rows.formatted import mode
from rows.ranks import TIMEOUT_S, started
from rows.row import Row

SCRIPT = Path(__file__).with_name("formatted.py")
UNIT = {"32-true": 256 * 2.0**-24, "bf16": 2.0**-8, "16": 2.0**-11, "float8": 2.0**-4}
FORMATS = (
    *("32-true", "bf16-mixed", "16-mixed"),
    *("bf16-true", "16-true", "bf16-true-no-master", "16-true-no-master"),
    *(["float8-mixed"] if find_spec("torchao") else []),
)
UPDATES, RATE = 20, 0.5


def run(folder: Path, precision: str, ranks: int, pipeline: int) -> str:
    return started([str(SCRIPT), str(folder), precision, str(pipeline)], ranks)


@cache
def alone(precision: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), precision, 1, 1)


def shared(precision: str, ranks: int, pipeline: int) -> tuple[str, str]:
    """sha256 of the run on these ranks, and on one process."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), precision, ranks, pipeline), alone(precision)


def killed(precision: str) -> tuple[str, str]:
    """sha256 of the run on one process, killed twice and resumed on two ranks, and of that left alone."""
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        for place in (("6", "1"), ("11", "3")):
            command = [sys.executable, str(SCRIPT), folder, precision, "1", *place]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            if done.returncode != -9:
                raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr}")
        return run(Path(folder), precision, 2, 1), alone(precision)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, WORDS))


def flat(values: list[Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in values])


@cache
def in_float64() -> tuple[Tensor, Tensor]:
    """The parameters before and after UPDATES updates of plain SGD in float64."""
    trained, data = model().double(), samples()
    begin, sgd = flat(list(trained.parameters())), torch.optim.SGD(trained.parameters(), lr=RATE)
    begins = [*range(0, SAMPLES - GLOBAL_BATCH + 1, GLOBAL_BATCH)]
    for update in range(UPDATES):
        start = begins[update % len(begins)]
        batch = data[start : start + GLOBAL_BATCH]
        words, targets = (torch.stack([sample[part] for sample in batch]) for part in (0, 1))
        sgd.zero_grad()
        (loss_sum(trained(words), targets) / (targets >= 0).sum()).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        sgd.step()
    return begin, flat(list(trained.parameters()))


def beside_float64(precision: str) -> tuple[float, float]:
    """How far the parameters are from those of float64, as a share of the way gone, and the bound."""
    begin, wanted = in_float64()
    whole = SAMPLES // GLOBAL_BATCH * GLOBAL_BATCH
    trained = model()
    trainer = evenstep.Trainer(
        model=trained,
        task=Words(),
        optimizer=torch.optim.SGD(trained.parameters(), lr=RATE),
        precision=mode(precision),
        data=evenstep.MapData(samples()[:whole], global_batch_size=GLOBAL_BATCH, micro_batch_size=4, shuffle=False),
        updates=UPDATES,
        device="cpu",
        train=evenstep.Training(clip_norm=CLIP, check_loss=False),
        log=evenstep.Logging(writers=()),
    )
    trainer.train()
    saved = trainer.state_dict()["model"]
    way = float((wanted - begin).norm())
    unit = next(value for name, value in UNIT.items() if precision.startswith(name))
    bound = 8 * unit
    if "no-master" in precision:
        bound += math.sqrt(UPDATES) * unit * float(wanted.norm()) / way
    return float((flat([saved[name] for name, _ in trained.named_parameters()]) - wanted).norm()) / way, bound


SHA = "sha256 of all that training changes"
WAYS = {"2 × 4": (2, 1), "4 × 2": (4, 1), "2 stages": (2, 2)}
ROWS = [
    *(
        Row(name=f"formats {precision}, {name}", measure=SHA, run=partial(shared, precision, *way))
        for precision in FORMATS
        for name, way in WAYS.items()
    ),
    *(
        Row(name=f"formats {precision}, killed twice, resumed on 2", measure=SHA, run=partial(killed, precision))
        for precision in FORMATS
    ),
    *(
        Row(
            name=f"formats {precision}, plain SGD with clipping",
            measure="distance to float64, of the way gone",
            run=partial(beside_float64, precision),
        )
        for precision in FORMATS
    ),
]
