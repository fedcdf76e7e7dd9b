"""Local SGD: each rank trains its own model, and a hook averages the models every H updates.

With θ the shared parameters, θ_r those of rank r, m = Σ_r θ_r / R their mean and Δ = θ - m, one outer step is

    v ← μ·v + Δ/γ                     v = 0 at first; γ = 1, or the inner learning rate for SlowMo
    θ ← θ - η·γ·v                     or, with `nesterov`, θ - η·γ·(Δ/γ + μ·v)
    θ_r ← θ

Lin et al. 2018, https://arxiv.org/abs/1808.07217. The number of ranks is part of the algorithm.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast, final

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError, NonFiniteError, ReplicaError
from evenstep.events import Hook, TrainEvent, UpdateEvent
from evenstep.parallel import Group
from evenstep.parallel.blocks import Dealing, begin_sum
from evenstep.tensors import byte_sum, named_buffers, named_parameters

if TYPE_CHECKING:
    from evenstep.train.trainer import Trainer


@final
class LocalSgd(Hook):
    """Averages the parameters of ranks that train a model each (`Single(ranks)`), and makes an outer step of SGD.

    Floating-point buffers are averaged, others are taken from rank 0. Optimizer state stays on its rank. Between two
    averages each rank evaluates its own model, so let `every` divide the updates of evaluations and saves.

    Args:
        every: H, in updates.
        lr: η, the outer learning rate; 1.0 takes the mean.
        momentum: μ, the outer momentum, at least 0 and below 1.
        nesterov: whether the outer step is Nesterov's, as in torch's SGD.
        by_inner_rate: whether γ is the learning rate of the parameter's group, as in SlowMo.
    """

    averages_ranks = True
    failure_policy = "stop"  # ranks whose models were not averaged must not go on
    priority = -100  # other hooks see the shared parameters

    def __init__(
        self,
        every: int,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        by_inner_rate: bool = False,
    ) -> None:
        self.settings = {"every": every, "lr": lr, "momentum": momentum, "nesterov": nesterov}
        self.settings["by_inner_rate"] = by_inner_rate
        self._every = every
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._by_inner_rate = by_inner_rate
        self._shared: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}

    @classmethod
    def bmuf(cls, every: int, *, momentum: float, lr: float = 1.0, nesterov: bool = False) -> Self:
        """Block momentum (Chen and Huo, 2016), as fairseq's BMUF: v ← μ·v + η·Δ, θ ← θ - v.

        fairseq's names: `global_sync_iter`, `block_momentum`, `block_lr`; `use_nbm` for θ ← θ - (1 + μ)·v.
        """
        return cls(every, lr=lr * (1 + momentum) if nesterov else lr, momentum=momentum)

    @classmethod
    def slowmo(cls, every: int, *, momentum: float, lr: float = 1.0) -> Self:
        """Slow momentum (https://arxiv.org/abs/1910.00643): γ is the inner learning rate of the last update."""
        return cls(every, lr=lr, momentum=momentum, by_inner_rate=True)

    @classmethod
    def diloco(cls, every: int, *, lr: float = 0.7, momentum: float = 0.9) -> Self:
        """DiLoCo (https://arxiv.org/abs/2311.08105): Nesterov's SGD as outer optimizer."""
        return cls(every, lr=lr, momentum=momentum, nesterov=True)

    def before_train(self, event: TrainEvent) -> None:
        parameters = named_parameters(self.trainer.model)
        for name, one in parameters.items():
            if one.dtype in (torch.float16, torch.bfloat16):
                raise ArgumentError(
                    f"`{name}` is {one.dtype}, but the mean is of float32 parameters; use a mixed precision."
                )
        if event.update == 0:
            held = [int(byte_sum(one)) for one in parameters.values()]
            if any(theirs != held for theirs in self._group.gather(held)):
                raise ReplicaError(
                    "ranks must begin with the same parameters, but differ; seed torch before the model is built."
                )
        if not self._shared and (self._lr != 1.0 or self._momentum > 0):
            self._shared = {name: one.detach().clone() for name, one in self._trained().items()}
            self._velocity = {name: torch.zeros_like(one) for name, one in self._shared.items()}

    def needs_settled(self, update: int) -> bool:
        return update % self._every == 0

    def after_update(self, event: UpdateEvent) -> None:
        if event.committed and self.needs_settled(event.update):
            with torch.no_grad():
                self._average(event.update)

    def state_dict(self) -> dict[str, Any]:
        return {"shared": self._shared, "velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parameters = named_parameters(self.trainer.model)
        self._shared = {name: one.to(parameters[name].device, copy=True) for name, one in state["shared"].items()}
        self._velocity = {name: one.to(parameters[name].device, copy=True) for name, one in state["velocity"].items()}

    @property
    def _group(self) -> Group:
        return cast("Trainer", self.trainer).engine.group

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: one for name, one in named_parameters(self.trainer.model).items() if one.requires_grad}

    def _average(self, update: int) -> None:
        trained = self._trained()
        buffers = named_buffers(self.trainer.model)
        values: dict[str, Tensor] = {**trained, **buffers}
        moving = {name: one for name, one in values.items() if one.is_floating_point()}
        finite = all(bool(one.isfinite().all()) for one in trained.values())
        broken = [rank for rank, is_finite in enumerate(self._group.gather(finite)) if not is_finite]
        if broken:
            raise NonFiniteError(f"the parameters of rank {broken[0]} are not finite after update {update}.")
        for name, mean in mean_over(self._group, moving).items():
            if name in self._shared:
                self._step(name, trained[name], mean)
            else:
                moving[name].copy_(mean)
        self._group.broadcast([one for name, one in buffers.items() if name not in moving])

    def _step(self, name: str, parameter: nn.Parameter, mean: Tensor) -> None:
        shared = self._shared[name]
        gradient = shared - mean
        velocity = self._velocity[name].mul_(self._momentum)
        rate = 1.0
        if self._by_inner_rate:
            groups = self.trainer.optimizer.param_groups
            rate = next(float(group["lr"]) for group in groups if any(one is parameter for one in group["params"]))
        if rate == 0:  # a schedule has ended at 0: the step for γ → 0
            velocity_step = gradient
        else:
            velocity.add_(gradient, alpha=1 / rate)
            velocity_step = velocity * rate
        if self._nesterov:
            velocity_step = gradient + self._momentum * velocity_step
        shared.sub_(velocity_step, alpha=self._lr)
        parameter.copy_(shared)


def mean_over(group: Group, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mean of each tensor over the ranks, added in a fixed binary tree; all ranks call it together."""
    means: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in values.values()):
        alike = {name: one for name, one in values.items() if one.dtype == dtype}
        flat = torch.cat([one.detach().reshape(-1) for one in alike.values()])
        dealing = Dealing(tuple(range(group.ranks)), tuple(range(group.ranks)))
        total = begin_sum(group, dealing, [flat], like=flat, elements=flat.numel())()()
        pieces = total.div_(group.ranks).split([one.numel() for one in alike.values()])
        means |= {name: piece.view(one.shape) for (name, one), piece in zip(alike.items(), pieces, strict=True)}
    return means
