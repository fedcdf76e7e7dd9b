"""What an optimizer of torch can't step is known before the first step, for each class and kind of parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.optim.sharing import TORCH
from evenstep.optim.trial_step import refusals
from evenstep.parallel import Single
from evenstep.train.checks.optimizer import check_optimizer


class Own(nn.Module):
    """One parameter of its own."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "matrix": lambda: nn.Linear(3, 2, bias=False),
    "sparse": lambda: nn.Embedding(4, 3, sparse=True),
    "bag": lambda: nn.EmbeddingBag(4, 3, sparse=True),
    "complex": lambda: Own(torch.zeros(4, 3, dtype=torch.complex64)),
    "number": lambda: Own(torch.tensor(1.0)),
    "vector": lambda: nn.LayerNorm(4, bias=False),
    "cube": lambda: nn.Conv1d(1, 2, 3, bias=False),
    "empty": lambda: Own(torch.zeros(0, 3)),
    "float64": lambda: nn.Linear(3, 2, bias=False).double(),
}
OPTIONS: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}, {"momentum": 0.9}, {"fused": True}, {"foreach": True}]
STEPS = [kind for kind in TORCH if kind is not torch.optim.LBFGS]


def raised_by_steps(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    (parameter,) = module.parameters()
    gradient = torch.randn_like(parameter)
    if getattr(module, "sparse", False):
        gradient = gradient.to_sparse(1)
    try:
        for _ in range(2):
            parameter.grad = gradient.clone()
            optimizer.step()
    except (RuntimeError, ZeroDivisionError):
        return True
    return False


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
def test_what_a_step_would_refuse_is_known_before(kind: Any) -> None:
    told, wrong = 0, []
    for name, make in KINDS.items():
        for options in OPTIONS:
            module = make()
            try:
                optimizer = kind(module.parameters(), **options)
            except (TypeError, ValueError):  # it says so itself
                continue
            before = [parameter.detach().clone() for parameter in module.parameters()]
            found = refusals(optimizer, module)
            assert all(map(torch.equal, before, module.parameters()))
            assert not optimizer.state_dict()["state"] or kind is torch.optim.Adagrad  # made by its constructor
            told += bool(found)
            if bool(found) != raised_by_steps(optimizer, module) and not (
                kind is torch.optim.SparseAdam and name in OWN
            ):
                wrong.append((name, options))
    assert not wrong
    assert told or kind in (torch.optim.Adagrad, torch.optim.SGD)


OWN = ("number", "empty")  # whose own code may give sparse gradients, or not: only the first step tells


def test_what_can_not_be_stepped_is_named_with_what_to_do() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    adam, sparse = torch.optim.Adam(model.parameters()), torch.optim.SparseAdam(list(model.parameters()))
    with pytest.raises(ArgumentError, match=r"Adam can't step `0\.weight`: .* build that layer without `sparse=True`"):
        check_optimizer(adam, model=model, strategy=Single(), device=torch.device("cpu"), keeps=False)
    with pytest.raises(ArgumentError, match=r"SparseAdam can't step `1\.weight` and 1 more: .*`MultiOptimizer"):
        check_optimizer(sparse, model=model, strategy=Single(), device=torch.device("cpu"), keeps=False)


def test_other_classes_are_not_tried() -> None:
    class Mine(torch.optim.Adam):
        pass

    model = nn.Embedding(4, 3, sparse=True)
    assert not refusals(Mine(model.parameters()), model)
