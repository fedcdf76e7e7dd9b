"""Predictions on several real processes: replicas of stages, shards, and real messages between them."""

from pathlib import Path

import torch
from scripts import Script, ended, started

SCRIPT = """
import sys, torch
from torch import nn
import evenstep
from evenstep.parallel import Fsdp, Mesh, Ddp, Processes
from evenstep.pipeline import PipelineModel

torch.set_num_threads(1)
world = Processes(torch.device("cpu"), timeout_s=120) if sys.argv[1] == "ranks" else None

class Fit(evenstep.Task):
    def weight(self, batch):
        return len(batch["y"])
    def inputs(self, batch):
        return batch["x"]
    def loss(self, output, batch):
        return ((output.sum(-1) - batch["y"]) ** 2).sum()
    def predict(self, output, batch):
        kept = {"out": output, "mask": output > 0, "half": output.bfloat16(), "none": output[:0], "n": batch["n"]}
        return [kept, None if len(output) < 2 else ("several", output.sum())]

def points(labels):
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(4, generator=generator) for _ in range(9)]
    return [{"x": x, "n": f"n{place}"} | ({"y": torch.tensor(1.0)} if labels else {}) for place, x in enumerate(xs)]

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

def found(model, strategy):
    trainer = evenstep.Trainer(
        model=model, task=Fit(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        updates=2, device="cpu", strategy=strategy,
        data=evenstep.MapData(points(True), global_batch_size=3, micro_batch_size=1, shuffle=False))
    unlabelled = evenstep.MapData(points(False), global_batch_size=5, micro_batch_size=2, shuffle=False)
    before = trainer.predict(unlabelled)
    trainer.train()  # with fewer micro-batches than ranks
    return [(list(one.samples), one.output) for one in [*before, *trainer.predict(unlabelled)]]

if world is None:
    torch.save(found(build(), None), sys.argv[2])
else:
    mesh = Mesh.of(world, pipeline=2)
    staged = found(PipelineModel(build(), mesh=mesh), Ddp(mesh.data))
    sharded = found(build(), Fsdp(world, reduction="fast"))
    torch.save((staged, sharded), f"{sys.argv[2]}{world.rank}")
    world.close()
"""


def check_same(mine: object, other: object, *, exact: bool) -> None:
    left, spec = torch.utils._pytree.tree_flatten(mine)
    right, other_spec = torch.utils._pytree.tree_flatten(other)
    assert spec == other_spec
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor) and not exact:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        elif isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert a == b


def test_stages_and_shards_predict_what_one_process_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = Script(script, "alone", tmp_path / "alone")
    four = started(script, "ranks", tmp_path / "rank", ranks=range(4), world=4)
    ends = ended([alone, *four], 240)
    assert [end.code for end in ends] == [0] * 5, ends
    wanted = torch.load(tmp_path / "alone", weights_only=False)
    assert [samples for samples, _ in wanted] == [[0, 1], [2, 3], [4], [5, 6], [7, 8]] * 2
    for rank in range(4):
        staged, sharded = torch.load(tmp_path / f"rank{rank}", weights_only=False)
        assert (len(staged), len(sharded)) == (10 * (rank == 0), 10 * (rank == 0))
        if rank == 0:
            check_same(staged, wanted, exact=True)
            # before any update, the same bits; after it, gradients were summed in another order
            check_same(sharded[:5], wanted[:5], exact=True)
            check_same(sharded[5:], wanted[5:], exact=False)
