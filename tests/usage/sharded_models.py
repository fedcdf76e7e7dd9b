"""Kinds of models under `fsdp`: the table that the battery walks, and from which docs can be generated.

Each works to the bit (`ordered-fsdp` against `ordered` on one process; `fsdp` up to the order of summation), or is
refused by name. Models are in float64 and tiny; a batch is (x [2, 8], y [2], number of the sample [2]).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sharded_models_nets import NETS
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Args:
        name: in words, as in the support matrix.
        model: builds it.
        refused: what the error says where it is refused; "" where it works.
        refused_as: the error's class.
        note: for the support matrix.
        fast: whether it is in the fast suite.
    """

    name: str
    model: Callable[[], nn.Module]
    refused: str = ""
    refused_as: str = "TaskError"
    note: str = ""
    fast: bool = False


def _kind(name: str, net: str, **more: Any) -> Kind:
    return Kind(name=name, model=NETS[net], **more)


WORKING = [
    _kind("a decoder that projects one memory to keys and to values", "Memory", fast=True),
    _kind("an input twice in nested containers and as keyword", "Nested", fast=True),
    _kind("outputs of items that several later ones take", "Skips"),
    _kind("weights tied between items", "TiedItems"),
    _kind("an embedding tied with the head", "TiedHead"),
    _kind("an item that is in the list twice", "ListedTwice"),
    _kind("checkpointed items", "Checkpointed", fast=True),
    _kind("re-entrantly checkpointed items", "Reentrant", fast=True),
    _kind("one item called several times (ALBERT)", "Albert", fast=True),
    _kind("lists inside lists", "NestedLists"),
    _kind("experts that only some ranks run", "Experts", fast=True),
    _kind("experts of other sizes", "UnequalExperts", fast=True),
    _kind("blocks left out at random (LayerDrop)", "LayerDrop", fast=True),
    _kind("blocks left out at random, checkpointed", "CheckpointedLayerDrop"),
    _kind("depth that grows with the updates", "Growing"),
    _kind("items in another order than they are listed", "Backwards", fast=True),
    _kind("items in another order, left out at random", "BackwardsLayerDrop"),
    _kind("nn.Transformer", "Transformer"),
    _kind("nn.MultiheadAttention", "Attention"),
    _kind("frozen items", "Frozen"),
    _kind("frozen items with trained adapters (LoRA)", "Lora"),
    _kind("items without parameters", "Bare"),
    _kind("ParameterList and ParameterDict", "ParameterLists"),
    _kind("parameters of the model itself", "RootParameters"),
    _kind("items that give dicts, tuples and None", "Structures"),
    _kind("recurrent items", "Recurrent"),
    _kind("parametrized items (weight normalisation)", "WeightNorm"),
    _kind("single numbers as parameters", "Scalars"),
    _kind("an item's loss kept as an attribute", "Aside"),
    _kind("items called without gradients", "Teacher"),
    _kind("items whose outputs the loss does not need", "Unneeded"),
    _kind("a head that no batch uses, in a list", "UnusedHead"),
    _kind("a U-Net", "UNet"),
]
