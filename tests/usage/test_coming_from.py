"""The pages "Coming from …": both versions are run as they stand there, and end with the same figures.

lightning and transformers are in the extra `dev`.
"""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
# Each page, and the loss that an untrained model stays above: log 4 for four classes, log 32 for as many tokens.
PAGES = {"from-a-loop": 1.36, "from-hf-trainer": 3.4, "from-lightning": 1.36}
TOLERANCE = 1e-6  # of float32 parameters after a dozen updates; the sums are added up in another order


def blocks_of(page: str) -> list[str]:
    """What both have, their version, and ours."""
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)


def lines_of(block: str) -> int:
    return len([line for line in block.splitlines() if line.strip()])


@pytest.mark.parametrize("page", PAGES)
def test_both_versions_of_a_page_end_with_the_same_figures(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    both, theirs, ours = blocks_of(page)
    ended: list[dict[str, Any]] = []
    for block in (theirs, ours):
        names: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what other libraries warn of
            exec(compile(both + block, f"{page}.md", "exec"), names)
        ended.append(names)
    one, other = ([*names["model"].parameters()] for names in ended)
    assert all(torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in zip(one, other, strict=True))
    assert float(ended[0]["valid_loss"]) == pytest.approx(float(ended[1]["valid_loss"]), abs=1e-6)
    assert float(ended[0]["valid_loss"]) < PAGES[page], "nothing was trained"


@pytest.mark.parametrize("page", PAGES)
def test_ours_takes_no_more_lines(page: str) -> None:
    _, theirs, ours = blocks_of(page)
    assert lines_of(ours) <= lines_of(theirs)
