"""The stages of a pipeline in shards: FSDP2 keeps, gathers and scatters; when it does is the plan's to say.

Stages are gathered before a plan and kept until they are reduced, so replicas may differ in micro-batches.
"""

from collections.abc import Iterator

from torch import nn

from evenstep.parallel.reducer.sharded import ShardedReducer


class PlanReducer(ShardedReducer):
    """Shards of one stage, which is whole while plans run; the arguments are those of `ShardedReducer`."""

    def begin(self) -> None:
        self._reset()
        self._accumulate_only()  # a try may have failed in the midst of its reduction

    def unshard(self) -> None:
        """Gather the stage's parameters: no forward or backward of the plan then waits for other ranks."""
        for part in self._parts():
            part.unshard()

    def reshard(self) -> None:
        live = [one for shard in self._shards for one in (shard.sharded_param, shard.unsharded_param)]
        gradients = [one.grad for one in live]
        self._fsdp.reset_iter_state()
        for one, gradient in zip(live, gradients, strict=True):
            one.grad = gradient  # which FSDP2 forgets as well since torch 2.15

    def _units(self) -> list[nn.Module]:
        return [layer for layer in layers(self.module) if any(True for _ in layer.parameters())]

    def _prepare(self) -> None:
        super()._prepare()
        self._fsdp.set_reshard_after_forward(False)
        self._accumulate_only()

    def _accumulate_only(self) -> None:
        self._fsdp.set_requires_gradient_sync(False)
        self._fsdp.set_is_last_backward(False)
        self._fsdp.set_reshard_after_backward(False)


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """What a module that only holds others, by dotted names, holds.

    >>> holder = nn.Module(); holder.add_module("blocks", nn.Module())
    >>> holder.blocks.add_module("0", nn.Linear(1, 1)); holder.add_module("head", nn.ReLU())
    >>> list(layers(holder))
    [Linear(in_features=1, out_features=1, bias=True), ReLU()]
    """
    for child in module.children():
        yield from layers(child) if type(child) is nn.Module else (child,)
