"""The private parts of torch's compiler are still as they were found."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from evenstep.contrib.compiled_update import compilations


def test_values_of_users_are_compared_at_each_call_and_modules_of_torch_are_not() -> None:
    torch.compiler.reset()
    kept: list[str] = []

    class Scaled:
        by = 2.0

    def choose(guards: Any) -> list[bool]:
        chosen = compilations.guards_kept(guards, ("held",))
        kept.extend(guard.name for guard, is_kept in zip(guards, chosen, strict=True) if is_kept)
        return chosen

    def scaled(held: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * Scaling.by + held[0])

    Scaling, own = Scaled(), cast("Any", {"guard_filter_fn": choose})
    compiled = torch.compile(scaled, backend="eager", fullgraph=True, options=own)
    one = torch.ones(1)
    first = compiled([one], one)
    Scaling.by = 3.0
    assert not torch.equal(compiled([one], one), first)
    assert not any(name.startswith(("held", "L['held']", "G['__import_torch")) for name in kept)
    compilations.keep_address([one])


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("L['gradients'].tasks[0].scale", True),
        ("G['__import_evenstep_of_ours']", True),
        ("G['__import_torchvision_dot_ops'].limit", True),
        ("dict(type(L['step'].formulas[0]).__dict__)['width']", False),
        ("G['__import_torch_dot_nn'].Linear", False),
        ("G['__import_evenstep_dot_train'].forward", False),
    ],
)
def test_a_comparison_is_left_out_by_what_it_begins_with(name: str, is_kept: bool) -> None:
    guard = SimpleNamespace(name=name, guard_type="EQUALS_MATCH")
    assert compilations.guards_kept([guard], ("step", "gradients.context")) == [is_kept]
