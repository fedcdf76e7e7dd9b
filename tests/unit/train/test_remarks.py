from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.train.remarks import Remarks


@pytest.mark.parametrize(
    ("samples", "advice"),
    [(1, "make a global batch at least 2 samples"), (4, "make `micro_batch_size` at most 2")],
)
def test_the_advice_for_ranks_without_work_gives_each_of_them_some(samples: int, advice: str) -> None:
    batch: Any = SimpleNamespace(
        num_samples=samples, num_microbatches=1, ends_epoch=False, position=SimpleNamespace(batch=0)
    )
    data: Any = SimpleNamespace(fingerprint=dict)
    (said,) = Remarks()(batch, data=data, ranks=2, outside=(), rank=0, update=1)
    assert advice in said.message
