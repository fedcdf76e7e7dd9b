"""FLOPs against what matrices take by hand: 2·m·k·n for each product, one forward and two backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Logging, MapData, Task, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.train.tryouts.flops import PEAKS, peak_flops, peak_of
from refused import refused

# per sample, of nn.Linear(8, 16) and nn.Linear(16, 4): no gradient of the input is needed
FORWARD = 2 * (8 * 16 + 16 * 4)
BACKWARD = 2 * (8 * 16) + 2 * 2 * (16 * 4)
PAIRS = [(torch.randn(8, generator=torch.Generator().manual_seed(x)), torch.ones(4)) for x in range(24)]


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def trained(
    folder: Path | None = None, *, log: Logging, dropout: float = 0.1, task: Task | None = None, **more: Any
) -> Trainer:
    torch.manual_seed(1)
    between = [nn.Dropout(dropout)] if dropout else []
    model = nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 4))
    trainer = Trainer(
        model=model,
        task=task or Squares(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        data=MapData(PAIRS, global_batch_size=6, micro_batch_size=3),
        updates=4,
        device="cpu",
        folder=folder,
        log=log,
        **more,
    )
    trainer.train()
    return trainer


def last(trainer: Trainer, name: str) -> float:
    record = trainer.storage.latest(name)
    assert record is not None, trainer.storage.names()
    return record.value


def test_the_rate_is_that_of_samples_times_what_matrices_take(tmp_path: Path) -> None:
    log = Logging(writers=(), every_updates=2, flops=True, peak_tflops=0.5)
    trainer = trained(tmp_path, log=log)
    rate = last(trainer, "perf/samples_per_s") * (FORWARD + BACKWARD)
    assert last(trainer, "perf/flops_per_s") == pytest.approx(rate, rel=1e-12)
    assert last(trainer, "perf/mfu") == pytest.approx(rate / 0.5e12, rel=1e-12)
    assert not (tmp_path / "incidents").exists()


def test_counting_changes_no_bit(tmp_path: Path) -> None:
    counted = trained(tmp_path / "a", log=Logging(writers=(), flops=True))
    plain = trained(tmp_path / "b", log=Logging(writers=()))
    assert all(torch.equal(*pair) for pair in zip(counted.model.parameters(), plain.model.parameters(), strict=True))
    losses = [[(one.update, one.value) for one in run.storage.history("train/loss")] for run in (counted, plain)]
    assert losses[0] == losses[1]


class Writes(Squares):
    def transform(self, batch: Any) -> Any:
        batch[0].div_(2)
        return batch


def test_without_a_known_peak_there_is_no_mfu_and_it_is_said_once(tmp_path: Path) -> None:
    trainer = trained(tmp_path, log=Logging(writers=(), every_updates=1, flops=True))
    assert last(trainer, "perf/flops_per_s") > 0
    assert "perf/mfu" not in trainer.storage.names()
    (incident,) = (tmp_path / "incidents").iterdir()
    assert "what cpu can do at most is not known" in incident.read_text()


@pytest.mark.slow
def test_a_compiled_model_is_counted_as_it_is_written(tmp_path: Path) -> None:
    log = Logging(writers=(), every_updates=2, flops=True)
    trainer = trained(tmp_path, log=log, dropout=0.0, train=Training(compile="model"))
    rate = last(trainer, "perf/samples_per_s") * (FORWARD + BACKWARD)
    assert last(trainer, "perf/flops_per_s") == pytest.approx(rate, rel=1e-12)


def test_devices_are_known_by_their_names_and_formats() -> None:
    assert peak_of("NVIDIA A100-SXM4-80GB", "bf16-mixed", tf32=False) == 312e12
    assert peak_of("NVIDIA A100-SXM4-80GB", "32-true", tf32=True) == 156e12
    assert peak_of("NVIDIA A100-SXM4-80GB", "32-true", tf32=False) == 19.5e12
    assert peak_of("NVIDIA H100 80GB HBM3", "float8-mixed", tf32=False) == 1979e12
    assert peak_of("NVIDIA L40S", "16-mixed", tf32=False) == 362e12
    assert peak_of("NVIDIA L4", "16-mixed", tf32=False) == 121e12
    assert peak_of("NVIDIA A100-SXM4-80GB", "float8-mixed", tf32=False) is None
    assert peak_of("NVIDIA A1000", "bf16-mixed", tf32=False) is None
    assert peak_of("Tesla T4", "16-true", tf32=False) == 65e12
    assert peak_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed", tf32=False) is None
    assert all(len(peaks) == 4 for peaks in PEAKS.values())


def test_tf32_is_known_by_either_of_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    products = torch.backends.cuda.matmul
    for set_it in (lambda: setattr(products, "allow_tf32", True), lambda: setattr(products, "fp32_precision", "tf32")):
        assert peak_flops(torch.device("cuda:0"), "32-true") == 19.5e12
        try:
            set_it()
            assert peak_flops(torch.device("cuda:0"), "32-true") == 156e12
        finally:
            products.fp32_precision = "none"
            torch.set_float32_matmul_precision("highest")
            products.fp32_precision = "none"


def test_a_peak_without_a_count_is_refused() -> None:
    with refused(ArgumentError, "peak_tflops"):
        Logging(peak_tflops=100)
