"""The private parts of torch's compiler are still as they were found."""

from typing import Any, cast

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
