from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import pytest
import torch

from evenstep.data import MapData
from evenstep.events import EvaluateEvent, TrainEvent


@pytest.fixture(scope="module")
def corpus(recipe_file: Callable[[str], ModuleType]) -> ModuleType:
    return recipe_file("gpt_bytes/corpus.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """60 files of Python source in two folders, and some that are to be left out."""
    for number in range(60):
        path = tmp_path / ("package" if number % 2 else "") / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"def function_{number}(x):\n    return x + {number}\n".encode() * (1 + number % 3))
    for left_out in ("test/test_module.py", "package/tests/x.py", "site-packages/y.py", "notes.txt"):
        path = tmp_path / left_out
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"LEFT OUT")
    return tmp_path


def test_every_file_is_in_exactly_one_split(corpus: ModuleType, source: Path):
    parts = {split: corpus.read_split(split, source).split(b"\0")[:-1] for split in ("train", "valid")}
    expected = sorted(path.read_bytes() for path in source.glob("**/module_*.py"))
    assert sorted(parts["train"] + parts["valid"]) == expected
    assert parts["train"] and parts["valid"]


def test_targets_are_inputs_shifted_by_one(corpus: ModuleType):
    text = bytes(range(256)) * 3
    windows = corpus.Windows(text, context=50)
    for number, (inputs, targets) in enumerate(windows[index] for index in range(len(windows))):
        start = number * 50
        assert inputs.dtype == targets.dtype == torch.int64
        assert bytes(inputs.tolist()) == text[start : start + 50]
        assert bytes(targets.tolist()) == text[start + 1 : start + 51]


@pytest.mark.parametrize("length", [51, 99, 100, 101, 102])
def test_windows_predict_each_byte_once_up_to_the_last_whole_window(corpus: ModuleType, length: int):
    text = bytes(range(length))
    windows = corpus.Windows(text, context=10)
    predicted = [byte for index in range(len(windows)) for byte in windows[index][1].tolist()]
    assert predicted == list(range(1, 1 + (length - 1) // 10 * 10))


def test_the_bits_of_the_bigram_model_are_those_of_numpy(corpus: ModuleType):
    random = np.random.default_rng(0)
    train, valid = (random.integers(90, 100, size=500, dtype=np.uint8) for _ in range(2))
    counts = np.full((256, 256), 0.3)
    np.add.at(counts, (train[:-1], train[1:]), 1.0)
    chance = counts / counts.sum(axis=1, keepdims=True)
    expected = -np.log2(chance[valid[:-1], valid[1:]]).sum()
    codes = torch.from_numpy(valid).long()
    actual = corpus.ByteBigram(train.tobytes(), alpha=0.3).bits(codes[:-1], codes[1:])
    assert actual == pytest.approx(expected, rel=1e-12)


class Writes(torch.nn.Module):
    """Stands in for a model that has been trained."""

    def generate(self, prompt: bytes, *, num_bytes: int, **_: object) -> bytes:
        return b"\x1b" * num_bytes


class FakeTrainer:
    def __init__(self, **evaluations: MapData):
        self.evaluations = evaluations
        self.model = Writes()


def end(outcome: Literal["done", "failed"]) -> TrainEvent:
    return TrainEvent(update=7, outcome=outcome, reason="", error=None)


def test_model_and_bigram_are_compared_on_the_bytes_of_the_evaluation(
    corpus: ModuleType, source: Path, capsys: pytest.CaptureFixture[str]
):
    windows = corpus.windows("valid", context=16, limit=3, root=source)
    trainer = FakeTrainer(valid=MapData(windows, global_batch_size=2, shuffle=False))
    hook = corpus.BigramAndSample(prompt="x", num_bytes=2, root=source)
    hook.attach(trainer)
    hook.before_train(TrainEvent(update=0, updates=7, resumed=False))
    hook.after_evaluate(EvaluateEvent(update=7, name="valid", metrics={"valid/bits_per_byte": 1.25}))
    hook.after_train(end("done"))

    bigram = corpus.ByteBigram(corpus.read_split("train", source))
    bits = sum(bigram.bits(*windows[index]) for index in range(3)) / 48
    printed = capsys.readouterr().out
    assert "model   1.250" in printed
    assert f"bigram  {bits:.3f}" in printed
    assert "| x\\x1b\\x1b" in printed
