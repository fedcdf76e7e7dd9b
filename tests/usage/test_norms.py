"""Norms of gradients and parameters are those of one process, on every layout of ranks."""

from typing import Any

import norms_programs as programs
import pytest
import torch
from launched import Failed, on_ranks
from torch import Tensor

from evenstep import Logging, Task, Trainer
from evenstep.events import Statistics
from evenstep.precision import Fp16Mixed, Precision

LAYOUTS = [
    ("ddp", 2, 1),
    ("zero1", 2, 1),
    ("fsdp", 2, 1),
    pytest.param("ordered-fsdp", 2, 1, marks=pytest.mark.slow),
    ("hybrid", 4, 1),
    ("single", 2, 2),
    ("ordered-fsdp", 4, 2),
    *(pytest.param(strategy, 4, 2, marks=pytest.mark.slow) for strategy in ("zero1", "fsdp")),
]


def _same(found: list[Any], alone: dict[str, list[float]]) -> None:
    assert not any(isinstance(one, Failed) for one in found), found
    for one in found:
        for name, values in one.items():
            assert values == pytest.approx(alone[name], rel=1e-9), name
    assert found[0].keys() == alone.keys()


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    [found] = on_ranks(1, programs.metrics_of, "single")
    assert not isinstance(found, Failed), found
    return found


@pytest.mark.parametrize(("strategy", "ranks", "pipeline"), LAYOUTS)
def test_norms_of_layers_and_groups_equal_one_process_and_count_a_scalar_once(
    strategy: str, ranks: int, pipeline: int, alone: dict[str, list[float]]
) -> None:
    _same(on_ranks(ranks, programs.metrics_of, strategy, pipeline), alone)


def test_norms_of_layers_and_groups_are_those_of_a_plain_loop(alone: dict[str, list[float]]) -> None:
    model = programs.model_with_numbers()
    inputs, targets = (torch.stack(parts) for parts in zip(*programs.points()[:8], strict=True))
    ((model(inputs).squeeze(-1) - targets) ** 2).mean().backward()
    for place in (0, 1, 3, 4, 5):
        gradients = torch.cat([one.grad.flatten() for one in model[place].parameters()])
        assert alone[f"train/grad_norm/{place}"][0] == pytest.approx(float(gradients.norm()), rel=1e-9)
    whole = torch.stack([torch.tensor(alone[f"train/grad_norm/{place}"]) for place in (0, 1, 3, 4, 5)]).norm(dim=0)
    assert whole.tolist() == pytest.approx(alone["train/grad_norm"], rel=1e-6)
    before = [one.detach().clone() for one in model.parameters()]
    groups = [{"params": [one for one in model.parameters() if one.ndim > 1]}]
    groups.append({"params": [one for one in model.parameters() if one.ndim <= 1], "lr": 0.01})
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(groups, lr=0.05).step()
    for number, is_matrix in enumerate((True, False)):
        pairs = [(new.detach(), old) for new, old in zip(model.parameters(), before, strict=True)]
        pairs = [(new, old) for new, old in pairs if (new.ndim > 1) == is_matrix]
        norm = torch.cat([new.flatten() for new, _ in pairs]).norm()
        change = torch.cat([(new - old).flatten() for new, old in pairs]).norm()
        assert alone[f"train/param_norm/{number}"][0] == pytest.approx(float(norm), rel=1e-9)
        assert alone[f"train/update_ratio/{number}"][0] == pytest.approx(float(change / norm), rel=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp", "ordered-fsdp"])
def test_a_scalar_parameter_counts_once_where_gradients_of_tasks_are_combined(strategy: str) -> None:
    [alone] = on_ranks(1, programs.metrics_of, "single", 1, True)
    _same(on_ranks(2, programs.metrics_of, strategy, 1, True), alone)


class Late(programs.Square):
    """Its weight is known after the forward only."""

    late_weight = True

    def loss(self, output: Any, batch: Any) -> Any:
        from evenstep import Loss

        return Loss(super().loss(output, batch), weight=len(output))


@pytest.mark.parametrize(("task", "precision"), [(Late(), None), (programs.Square(), Fp16Mixed(initial=1024.0))])
def test_norms_of_layers_have_nothing_of_a_loss_scale_or_a_late_weight(task: Task, precision: Precision | None) -> None:
    def found(task: Task, precision: Precision | None) -> Tensor:
        model = programs.model_with_numbers().float()
        data = programs.points()
        data = [(x.float(), y.float()) for x, y in data]
        trainer = Trainer(
            model=model,
            task=task,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            data=programs.evenstep.MapData(data, global_batch_size=8, micro_batch_size=2),
            updates=1,
            device="cpu",
            precision=precision,
            hooks=[Statistics(every_updates=1, gradient_norms=True)],
            log=Logging(every_updates=1, writers=()),
        )
        trainer.train()
        norms = programs.history_of(trainer)
        return torch.tensor([norms[name][0] for name in sorted(norms) if name.startswith("train/grad_norm")])

    torch.testing.assert_close(found(task, precision), found(programs.Square(), None), rtol=1e-2, atol=1e-4)
