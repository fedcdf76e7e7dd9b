"""A compiled model on a device: the run that is not compiled, the same bits each time, and no wait of the host."""

from typing import Any

import pytest
import torch
from launched import on_ranks
from ranks_programs import compiled_in_stages
from work import batches, engine_of, flat, in_blocks, no_waiting, precision_of, sha256

from evenstep import Ema, Engine, Training
from evenstep.train.engine import global_batch

pytestmark = [
    pytest.mark.slow,  # on a CPU; `make gpu` runs them all the same
    # torch's own, while it compiles a part that is called with the output of another
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
UPDATES = 6


def engine(device: torch.device, compile: Any, precision: str) -> Engine:
    train = Training(clip_norm=1.0, ema=Ema(decay=0.9), check_loss=False, settle_every_updates=100, compile=compile)
    return engine_of(device, in_blocks(), precision=precision_of(precision, device), train=train)


def dispatched(engine: Engine, device: torch.device) -> None:
    batch = global_batch(batches(3, device=device), engine.progress.position, engine.reducers.group)
    engine.ledger.add(engine.parts.compute(batch, engine.progress))


def trained(device: torch.device, compile: str, precision: str) -> Engine:
    one = engine(device, compile, precision)
    for _ in range(UPDATES):
        dispatched(one, device)
        assert one.ledger.settle() is None
    return one


@pytest.mark.parametrize(("precision", "within"), [("32-true", 1e-4), ("bf16-mixed", 1e-1), ("float8-mixed", 3e-1)])
def test_a_compiled_run_is_near_the_other_and_has_the_same_bits_each_time(
    device: torch.device, precision: str, within: float
) -> None:
    """As a share of the way that the parameters have gone; dropout draws the same numbers."""
    if device.type == "cpu" and precision != "32-true":
        pytest.skip("on the CPU other tests show it")
    one, again, plain = (trained(device, compile, precision) for compile in ("model", "model", "off"))
    assert sha256(one.state_dict()["model"]) == sha256(again.state_dict()["model"])
    begin, end = flat(engine(device, "off", precision).model), flat(plain.model)
    assert float((flat(one.model) - end).norm()) <= within * float((end - begin).norm())


def test_compiled_layers_in_stages_have_the_bits_of_one_process(device: torch.device) -> None:
    ends = [on_ranks(of, compiled_in_stages, device.type, of)[0] for of in (1, 2)]
    assert ends[0] == ends[1], ends


def test_compiled_updates_are_not_waited_for(device: torch.device) -> None:
    one = engine(device, "model", "bf16-mixed")
    for _ in range(3):  # compiled, and the host decides the first step
        dispatched(one, device)
        assert one.ledger.settle() is None
    with no_waiting(device):
        for _ in range(3):
            dispatched(one, device)
    assert one.ledger.settle() is None
    assert one.progress.update == 6
