"""Quantisation noise: in each update a part of the weights' blocks is dropped, so that a model bears its quantisation.

    b_ij = W[i, j·d : (j + 1)·d]                blocks of d neighbouring weights of a row, as in product quantisation
    b̂_ij = m_ij · b_ij / (1 - p)                what a layer computes with in an update, m_ij being 0 with probability p
    ∂L/∂b_ij = ∂L/∂b̂_ij                         straight through: also what was dropped learns

m is drawn anew for each update by (seed, update, name of the layer), not for each forward, so it does not depend on how
the batch is cut, and nothing of it is saved. Reference: Fan et al., "Training with quantization noise for extreme model
compression", 2020 (https://arxiv.org/abs/2004.07320), whose simplest noise it is: of blocks that are 0.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import require_names, require_number, require_seed, require_whole
from evenstep.errors import ArgumentError
from evenstep.events import Hook, TrainEnd, UpdateBegin
from evenstep.events.hook import HookTrainer
from evenstep.extras.quantization.layers import KINDS, ProductQuantized, check_blocks, on_all_stages
from evenstep.internals import parameters_of
from evenstep.keys import key


class NoisyLayer(nn.Module):
    """A layer that computes with blocks of its weight dropped while it trains."""

    evenstep_not_for: ClassVar[Mapping[str, str]] = {
        "compile": "which computes with other numbers in each update; leave `compile` out",
    }
    noise_of_update: int | None  # None: none is made
    noise_drawn: tuple[int, Tensor] | None  # of which update, and which blocks are kept
    noise_options: tuple[int, str, float, int]  # seed, name of the layer, p, block size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        update = self.noise_of_update
        if not self.training or update is None or (isinstance(self, ProductQuantized) and self.is_quantized):
            return super().forward(*args, **kwargs)
        held = parameters_of(self)
        weight = cast("nn.Parameter", held["weight"])
        held["weight"] = cast("nn.Parameter", _Dropped.apply(weight, self._factors(weight, update)))
        try:
            return super().forward(*args, **kwargs)
        finally:
            held["weight"] = weight

    def _factors(self, weight: Tensor, update: int) -> Tensor:
        """What the weight is multiplied by in an update, in its shape."""
        seed, name, p, block_size = self.noise_options
        if self.noise_drawn is None or self.noise_drawn[0] != update:
            generator = torch.Generator().manual_seed(key(seed, "quantization noise", name, update))
            kept = torch.rand(weight.numel() // block_size, generator=generator) >= p
            self.noise_drawn = update, kept.to(weight.device)
        blocks = self.noise_drawn[1].to(weight.dtype) / (1 - p)
        return blocks[:, None].expand(-1, block_size).reshape(weight.shape)


class _Dropped(torch.autograd.Function):
    """A weight times factors, whose gradient passes as if it had not been multiplied."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factors: Tensor) -> Tensor:
        return weight * factors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


@final
class QuantizationNoise(Hook):
    """Drops blocks of weights in each update, of layers that will be quantised.

    Give it the model before it is trained: `prepare` changes the layers' class, and nothing that they hold. In a run
    file that is done for you. Beside `ProductQuantization` give it after that; a layer has noise until it is quantised.

    Args:
        layers: patterns of the names of layers, in which `*` is any text: "blocks.*.mlp.*".
        p: which part of the blocks is dropped.
        block_size: how many neighbouring weights of a row are a block; it divides the rows of all of them.
        after_update: after how many committed updates the noise begins.
        seed: of what is dropped.

    Raises:
        ArgumentError: an argument that cannot be.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    >>> QuantizationNoise(["0"], p=0.1).prepare(model)
    >>> model
    Sequential(
      (0): NoisyLinear(in_features=8, out_features=16, bias=True)
      (1): Linear(in_features=16, out_features=2, bias=True)
    )
    """

    failure_policy = "stop"

    def __init__(
        self, layers: Sequence[str], *, p: float = 0.1, block_size: int = 8, after_update: int = 0, seed: int = 0
    ) -> None:
        self._patterns = require_names("layers", layers, "`layers=('blocks.*',)`")
        require_number("p", p, "(0, 1)", "above 0 and below 1", "0.05 to 0.2 is usual")
        require_whole("block_size", block_size, advice="8, that of the quantisation, is usual")
        require_whole("after_update", after_update, at_least=0, advice="0 begins with the first update")
        require_seed(seed)
        self._p, self._block_size, self._after_update, self._seed = p, block_size, after_update, seed
        self._layers: list[NoisyLayer] = []

    def prepare(self, model: nn.Module) -> None:
        """Make the layers such that can be noisy. Of a model in stages each rank has its own; all call it together.

        Raises:
            ArgumentError: a pattern that fits no layer, or a layer that can't be.
        """
        for name in self._chosen(model, (*KINDS, ProductQuantized)):
            layer = model.get_submodule(name)
            if type(layer) not in KINDS and type(layer) not in KINDS.values():
                raise ArgumentError(
                    f"`{name}` is a {type(layer).__name__}, but noise can have "
                    f"{', '.join(kind.__name__ for kind in KINDS)}, these very classes, or what `ProductQuantization` "
                    f"has prepared before; leave it out."
                )
            check_blocks(name, cast("Tensor", parameters_of(layer)["weight"]), self._block_size)
            if getattr(layer, "sparse", False) or getattr(layer, "max_norm", None) is not None:
                raise ArgumentError(f"`{name}` has `sparse` or `max_norm`, with which it has no noise; leave it out.")
            noisy = cast("NoisyLayer", layer)
            noisy.__class__ = _noisy(type(layer))
            noisy.noise_of_update, noisy.noise_drawn = None, None
            noisy.noise_options = self._seed, name, self._p, self._block_size

    def attach(self, trainer: HookTrainer) -> None:
        names = self._chosen(trainer.model, (NoisyLayer,))
        self._layers = [cast("NoisyLayer", trainer.model.get_submodule(name)) for name in names]
        super().attach(trainer)

    def before_update(self, event: UpdateBegin) -> None:
        for layer in self._layers:
            layer.noise_of_update = event.update if event.update > self._after_update else None

    def after_train(self, event: TrainEnd) -> None:
        for layer in self._layers:
            layer.noise_of_update = layer.noise_drawn = None

    def _chosen(self, model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[str]:
        there = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        known = on_all_stages(model, there)
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ArgumentError(
                    f"`layers` of QuantizationNoise has {pattern!r}, which fits no layer that can have noise: call "
                    f"`prepare(model)` before the model is trained, and name layers by patterns such as 'blocks.*'; "
                    f"there are {', '.join(known[:8]) or 'none'}."
                )
        return [name for name in there if any(fnmatchcase(name, pattern) for pattern in self._patterns)]


@cache
def _noisy(kind: type[nn.Module]) -> type[NoisyLayer]:
    """The class of such layers that have noise."""
    not_for = {**getattr(kind, "evenstep_not_for", {}), **NoisyLayer.evenstep_not_for}
    return type(f"Noisy{kind.__name__}", (NoisyLayer, kind), {"evenstep_not_for": not_for})
