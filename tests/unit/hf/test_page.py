"""The page about models of transformers: its blocks, run one after the other as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_the_blocks_of_the_page_run(transformers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), names)
    tokens = torch.tensor([[1, 5, 9]])
    with names["adapted"].disable_adapter():  # they stand within `read`
        assert torch.equal(scores(names["read"], tokens), scores(names["model"], tokens))
    torch.testing.assert_close(scores(names["again"], tokens), scores(names["adapted"], tokens), rtol=0, atol=1e-6)
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


def scores(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits
