import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

Load = Callable[[str], ModuleType]


@pytest.fixture
def tokens(recipe_file: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = recipe_file("gpt2_124m/tokens.py")
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def test_windows_go_on_from_file_to_file_and_predict_no_token_twice(tokens: ModuleType, tmp_path: Path):
    tokens.write_tokens(tmp_path / "data" / "a_1.bin", range(100, 111))  # 3 windows of 3, and a token over
    tokens.write_tokens(tmp_path / "data" / "a_2.bin", range(60_000, 60_007))
    data = tokens.Windows("data/a_*.bin", context=3)
    assert len(data) == 5
    assert [window[0].tolist() for window in data] == [
        [100, 101, 102],
        [103, 104, 105],
        [106, 107, 108],
        [60_000, 60_001, 60_002],
        [60_003, 60_004, 60_005],
    ]
    assert data[2][1].tolist() == [107, 108, 109]
    assert len(tokens.Windows("data/a_*.bin", context=3, limit=2)) == 2


def test_a_file_is_laid_out_as_llm_c_does_it(tokens: ModuleType, tmp_path: Path):
    tokens.write_tokens(tmp_path / "one.bin", [1, 2, 50_256])
    written = (tmp_path / "one.bin").read_bytes()
    assert struct.unpack("<256i", written[:1024]) == (20240520, 1, 3, *[0] * 253)
    assert struct.unpack("<3H", written[1024:]) == (1, 2, 50_256)


def test_it_begins_as_even_odds_and_reads_only_what_comes_before(recipe_file: Load):
    torch.manual_seed(0)
    model = recipe_file("gpt2_124m/model.py").GPT(tokens=9, layers=2, width=8, heads=2, context=6)
    assert torch.equal(model(torch.tensor([[1, 2, 3]])), torch.zeros(1, 3, 9))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    ours, others = model(torch.tensor([[1, 2, 3, 4]])), model(torch.tensor([[1, 2, 5, 6]]))
    assert torch.equal(ours[:, :2], others[:, :2])
    assert not torch.equal(ours[:, 2:], others[:, 2:])
    assert float(ours.detach().abs().max()) <= 30
    passed = torch.tensor([[1, 2, 3, 4]])
    for layer in model.layers():
        passed = layer.build(passed)
    assert torch.equal(passed, ours)
