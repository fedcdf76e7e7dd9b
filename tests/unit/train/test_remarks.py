from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from evenstep import Task, Trainer
from evenstep.data import AllTasks, Data, MapData, Mixture, StreamData, UpdateData, data_of
from evenstep.train.checks.first_update import remarks

LOADER: Any = DataLoader([1.0] * 8, batch_size=4)


@pytest.mark.parametrize(
    ("data", "samples", "advice"),
    [
        (lambda: MapData([1] * 8, global_batch_size=4), 1, "make a global batch at least 2 samples"),
        (lambda: MapData([1] * 8, global_batch_size=4), 4, "global_batch_size=4, micro_batch_size=2)`, in a run file"),
        (lambda: data_of(LOADER, "data"), 4, "write `MapData(dataset, global_batch_size=4, micro_batch_size=2)`"),
        (lambda: MapData([1] * 8, global_batch_tokens=4, lengths=[1] * 8), 4, "lower `micro_batch_tokens`"),
        (lambda: StreamData([1] * 8, global_batch_size=4, shared=True), 4, "make `micro_batch_size` at most 2"),
        (lambda: StreamData(LOADER, batched=True, shared=True), 4, "raise `num_microbatches`"),
        (lambda: UpdateData([[1, 2]]), 4, "give each update as a tuple of more batches"),
        (
            lambda: Mixture({"a": MapData([1] * 8, global_batch_size=4)}, mixing=AllTasks()),
            4,
            "lower the `micro_batch_size` of its parts",
        ),
    ],
)
def test_the_advice_for_ranks_without_work_gives_each_of_them_some(
    data: Callable[[], Data], samples: int, advice: str
) -> None:
    batch: Any = SimpleNamespace(
        num_samples=samples, num_microbatches=1, ends_epoch=False, position=SimpleNamespace(batch=0)
    )
    (said,) = remarks(batch, data=data(), ranks=2, outside=(), holding=(), rank=0, update=1)
    assert advice in said.message


class Sum(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return output.sum()


def test_a_task_that_no_data_have_batches_of_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def said(**evaluations: Data) -> list[str]:
        caplog.clear()
        model = nn.Linear(2, 1)
        trainer = Trainer(
            model=model,
            task={"box": Sum(), "class": Sum()},
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=Mixture({"box": MapData([torch.ones(2)] * 4, global_batch_size=2)}),
            evaluations=evaluations,
            updates=3,
            device="cpu",
        )
        trainer.train()
        return [record.getMessage() for record in caplog.records if "never trained" in record.getMessage()]

    (remark,) = said()
    assert remark.startswith("task `class` is given but never trained or evaluated: neither `data` nor `evaluations`")
    assert not said(valid=Mixture({"class": MapData([torch.ones(2)] * 4, global_batch_size=2)}, end="max"))
