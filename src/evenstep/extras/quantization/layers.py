"""Layers whose weight becomes centroids[assignments]: a layer is changed in place, by its class.

It has all its parameters from the beginning: `weight`, which trains until the layer is quantised; `centroids`, which
train from then on; and the buffer `assignments`, -1 until then. So optimizers, ranks, averages and checkpoints know one
set of names and shapes for the whole run. The parameter `weight` then holds the values of which the layer is made, so
that whoever reads the model as a plain one reads what it computes.

Ranks that hold shards cut `weight` and `centroids` by rows, as any parameter, and all have the `assignments`. Where the
layer computes, both are gathered: a centroid's gradient is of all its blocks, and summed over ranks as any other.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.errors import ArgumentError
from evenstep.internals import local_tensor, parameters_of, times_written
from evenstep.parallel.layout import cut_like, whole_tensor
from evenstep.pipeline import pipeline_of


class ProductQuantized(nn.Module):
    """What such layers have in common."""

    evenstep_not_for: ClassVar[Mapping[str, str]] = {
        "whole of stages": "whose codebook the whole model, put together of stages, lacks; leave one of them out",
        "local": "whose codebook would differ where ranks step alone; take the strategy `ddp`, `zero1` or `fsdp`",
        "changing ranks": "which a rank that joins in mid-run would not know to be quantised; let a lost rank end it",
        "16 bits": "whose weight follows centroids in float32; take `bf16-mixed`, or `bf16-true` with `fsdp`",
        "compile": "which is another layer from a set update on, while what is compiled stays; leave `compile` out",
    }
    centroids: nn.Parameter
    assignments: Tensor
    _averages: bool
    _known: "tuple[Tensor, int, bool] | None"

    if not TYPE_CHECKING:  # which takes it for the layer's own

        @property
        def weight(self) -> Any:
            """What the layer computes with, in its shape: its weight, or centroids[assignments] once it has some.

            Between two passes ranks may hold shards of both; then the parameter, whose values are the same.
            """
            is_whole = local_tensor(self.centroids) is self.centroids
            return self.built(self.centroids) if is_whole and self.is_quantized else self.dense

    @property
    def dense(self) -> nn.Parameter:
        """The parameter `weight`."""
        return cast("nn.Parameter", parameters_of(self)["weight"])

    @property
    def is_quantized(self) -> bool:
        """Whether the layer is made of centroids; it follows what is loaded into `assignments`."""
        buffer = self.assignments
        known, times = self._known, times_written(buffer)
        if known is None or known[0] is not buffer or known[1] != times:  # else no device is asked
            is_quantized = not buffer.is_meta and bool(buffer[0] >= 0)
            self._known = known = (buffer, times, is_quantized)
        return known[2]

    def built(self, centroids: Tensor) -> Tensor:
        """centroids[assignments] in the shape of the weight.

        The gradient of a centroid is the sum of those of its blocks, or their mean: the kernel divides by their number.
        What was gathered in 16 bits is taken in 32, in which many small gradients add up.
        """
        wide = centroids.float() if centroids.itemsize < 4 else centroids
        rows = functional.embedding(self.assignments, wide, scale_grad_by_freq=self._averages)
        return rows.to(centroids.dtype).view(self.dense.shape)

    @torch.no_grad()
    def quantize(self, centroids: Tensor, assigned: Tensor) -> None:
        """Be made of these centroids from here on, which all ranks have whole."""
        whole = centroids.to(self.centroids.device, self.centroids.dtype)
        self.centroids.copy_(cut_like(self.centroids, whole))
        self.assignments.copy_(assigned)
        self._hold(whole)

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the parameter `weight` hold what the layer is made of. Ranks that hold shards call it together."""
        self._hold(whole_tensor(self.centroids))

    def _hold(self, centroids: Tensor) -> None:
        self.dense.copy_(cut_like(self.dense, self.built(centroids)))


class ProductQuantizedLinear(ProductQuantized, nn.Linear):
    """A linear layer."""


class ProductQuantizedEmbedding(ProductQuantized, nn.Embedding):
    """An embedding."""


class ProductQuantizedConv1d(ProductQuantized, nn.Conv1d):
    """A convolution over one dimension."""


class ProductQuantizedConv2d(ProductQuantized, nn.Conv2d):
    """A convolution over two dimensions."""


KINDS: Mapping[type[nn.Module], type[ProductQuantized]] = {
    nn.Linear: ProductQuantizedLinear,
    nn.Embedding: ProductQuantizedEmbedding,
    nn.Conv1d: ProductQuantizedConv1d,
    nn.Conv2d: ProductQuantizedConv2d,
}


def on_all_stages(model: nn.Module, names: Sequence[str]) -> Sequence[str]:
    """These names of all ranks that hold parts of the model, which call it together."""
    return [one for theirs in pipeline_of(model).gather(list(names)) for one in theirs]


def check_blocks(name: str, weight: Tensor, block_size: int) -> None:
    """Raise ArgumentError unless each row of the weight of the layer `name` is a whole number of blocks."""
    row = weight[0].numel()
    if row % block_size:
        raise ArgumentError(
            f"`{name}` has rows of {row} numbers, which blocks of {block_size} do not divide; set a `block_size` that "
            f"divides {row}, or leave the layer out."
        )


def change(name: str, layer: nn.Module, *, block_size: int, num_centroids: int, averages: bool) -> None:
    """Make `layer` one that can be quantised, in place.

    Args:
        name: of the layer, for messages.
        averages: whether the gradient of a centroid is the mean of its blocks' instead of their sum.

    Raises:
        ArgumentError: a layer that can't be.
    """
    if type(layer) not in KINDS:
        raise ArgumentError(
            f"`{name}` is a {type(layer).__name__}, but quantised can be {', '.join(kind.__name__ for kind in KINDS)}, "
            f"these very classes; leave it out."
        )
    weight = cast("nn.Parameter", parameters_of(layer)["weight"])
    if getattr(layer, "sparse", False) or getattr(layer, "max_norm", None) is not None:
        raise ArgumentError(f"`{name}` has `sparse` or `max_norm`, with which it can't be quantised; leave it out.")
    if not weight.dtype.is_floating_point or weight.itemsize < 4:
        raise ArgumentError(f"`{name}` has a weight of {weight.dtype}, but it must be float32 or float64; convert it.")
    check_blocks(name, weight, block_size)
    num_blocks = weight.numel() // block_size
    if num_blocks < num_centroids:
        raise ArgumentError(
            f"`{name}` has {num_blocks} blocks of {block_size}, fewer than {num_centroids} centroids; lower "
            f"`num_centroids`, or leave the layer out."
        )
    changed = cast("ProductQuantized", layer)
    changed.__class__ = KINDS[type(layer)]
    changed.centroids = nn.Parameter(torch.zeros(num_centroids, block_size, dtype=weight.dtype, device=weight.device))
    changed.register_buffer("assignments", torch.full((num_blocks,), -1, dtype=torch.int32, device=weight.device))
    changed._averages, changed._known = averages, None  # pyright: ignore[reportPrivateUsage] - made here
