"""Full sharding whose gradients are summed in one fixed order: the same bits as `Ordered`, and as one process.

Each micro-batch's gradients are taken before FSDP2 would reduce them and summed in the tree of `parallel.tree`; each
rank keeps its shard of the total. Parameters and optimizer state are sharded, gradients are whole while they are
summed and overlap nothing; `Fsdp` is the fast way.
"""

from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.errors import ArgumentError
from evenstep.parallel.group import Group
from evenstep.parallel.internals import leave_inputs_alone
from evenstep.parallel.sharded import Sharded, nothing
from evenstep.parallel.tree import Tree


@final
class OrderedFsdp(Sharded):
    """Shards of gradients that were summed in the order of their micro-batches' numbers; see `Sharded`."""

    collects = True
    _reduced = 0  # sums since the last step

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        check_exact(self.group, optimizer)
        super().adopt(optimizer)
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._order = {id(parameter): place for place, parameter in enumerate(self._parameters)}

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        gradients = [*(_unreduced(shard) for shard in self._shards), *(number.grad for number in self._numbers)]
        present = [g if has else None for g, has in zip(gradients, self._present, strict=True)]
        self._present = [False] * len(self._present)
        self._forget_gradients()
        self._tree.add(microbatch, present)

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        self._spoken.finish()
        self._reducing = True
        total = self._tree.total(self.group, num_microbatches=num_microbatches)
        self._total: dict[int, Tensor] = {}
        self._reduced += 1
        parameters = [*(shard.sharded_param for shard in self._shards), *self._numbers]
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = None if gradient is None else self.part(parameter, gradient)
            place = self._order.get(id(parameter))
            if gradient is not None and place is not None:
                self._total[place] = gradient

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        if self._reducing:
            raise error
        self._follow_to_the_end(nothing)
        self._tree.spoil(self.group)

    def begin(self, module: Callable[..., Any]) -> None:
        super().begin(module)
        self._new_tree()

    def squared_norm(self, gradients: list[Tensor], norms: Callable[[list[Tensor]], Tensor]) -> Tensor:
        total, self._total = self._total, {}
        if self._reduced > 1:  # what is applied was made of several sums
            having = [parameter for parameter in self._parameters if parameter.grad is not None]
            total = {self._order[id(one)]: self.whole(cast("Tensor", one.grad)) for one in having}
        self._reduced = 0
        # as one process orders them: like the gradients that were given
        order = {id(gradient): number for number, gradient in enumerate(gradients)}
        of_place = {place: getattr(one.grad, "_local_tensor", one.grad) for place, one in enumerate(self._parameters)}
        each = norms([total[place] for place in sorted(total, key=lambda place: order.get(id(of_place[place]), place))])
        return each.dot(each)

    def facing(self, gradient: Tensor) -> Tensor:
        return self.whole(gradient)

    def over_shards(self, products: Tensor) -> None: ...

    def abandon(self) -> None:
        super().abandon()
        self._reduced = 0
        self._new_tree()

    def _prepare(self) -> None:
        super()._prepare()
        for part in self._parts():
            leave_inputs_alone(part)
        self._module.set_requires_gradient_sync(False)
        self._new_tree()

    def _new_tree(self) -> None:
        self._tree = Tree([*(shard.unsharded_param for shard in self._shards), *self._numbers])
        self._reducing = False

    def _owe(self) -> None:
        self._follow()  # nothing is reduced in the backward, so it may as well go first
        self._forget_gradients()


def check_exact(group: Group, optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError where a step of shards on a CPU would not have the bits of a step of the whole."""
    if group.device.type != "cpu":
        return
    if any(options.get("fused") for options in optimizer.param_groups):
        raise ArgumentError(
            "on the CPU, torch's fused optimizers round the ends of a tensor differently from its middle, so a "
            "step of shards does not have the bits of a step of the whole; build the optimizer with "
            "`foreach=True` instead of `fused=True`, or reduce as `fast`."
        )
    trained = [p for options in optimizer.param_groups for p in options["params"] if p.requires_grad]
    narrow = {parameter.dtype for parameter in trained} & {torch.float16, torch.bfloat16}
    if narrow:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
        raise ArgumentError(
            f"the model has parameters in {names}: on the CPU, torch rounds the ends of such a tensor differently from "
            f"its middle, so a step of shards does not have the bits of a step of the whole. Keep the parameters in "
            f"float32 (with `bf16-mixed` the model computes in 16 bits), use `zero1`, which steps whole tensors, or "
            f"reduce as `fast`."
        )


def _unreduced(shard: Any) -> Tensor | None:
    """The gradient that FSDP2 has kept from reduction: as autograd left it, or already in the format to reduce in."""
    kept = shard.unsharded_accumulated_grad
    return shard.unsharded_param.grad if kept is None else kept
