"""Names that have changed still work for one version, and say what they are called now."""

from typing import Any

import pytest
import torch

import evenstep
from evenstep import pipeline, precision


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (evenstep, "Full", "FullPrecision"),
        (precision, "Full", "FullPrecision"),
        (evenstep, "Staged", "PipelineModel"),
        (pipeline, "Staged", "PipelineModel"),
    ],
)
def test_an_old_public_name_warns_and_is_the_new_one(module: Any, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"`.*{old}` is called `.*{new}` now"):
        found = getattr(module, old)
    assert found is getattr(module, new)


def test_a_task_whose_inverse_is_called_postprocess_now_is_told_and_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"`Halved\.inverse` is called `Halved\.postprocess` now"):

        class Halved(evenstep.Task):
            def inverse(self, output: Any, batch: Any) -> Any:
                return output / 2

            def loss(self, output: Any, batch: Any) -> Any:
                return output.sum()

    assert Halved().postprocess(4.0, None) == 2.0


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Fulll'"):
        _ = evenstep.Fulll


@pytest.mark.parametrize("what", ["save", "evaluate"])
def test_what_hooks_have_asked_for_is_requested_now(what: str) -> None:
    model = torch.nn.Linear(1, 1)
    data = evenstep.MapData([(torch.zeros(1), torch.zeros(1))] * 2, global_batch_size=2)

    class Line(evenstep.Task):
        def loss(self, output: Any, batch: Any) -> Any:
            return (output - batch[1]).square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = evenstep.Trainer(
        model=model, task=Line(), optimizer=optimizer, data=data, evaluations={"valid": data}, updates=1, device="cpu"
    )
    with pytest.warns(DeprecationWarning, match=rf"`trainer\.ask_{what}` is called `trainer\.request_{what}` now"):
        getattr(trainer, f"ask_{what}")()
    assert getattr(trainer._loop.requests, what)
