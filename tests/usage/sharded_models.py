"""Kinds of models under `fsdp`: the table that the battery walks, and from which docs can be generated.

Each works to the bit (`ordered-fsdp` against `ordered` on one process; `fsdp` up to the order of summation). The models
are in `sharded_models_nets`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Args:
        name: in words.
        net: the class in `sharded_models_nets`.
        note: for readers of the table.
        fast: whether it is in the fast suite.
    """

    name: str
    net: str
    note: str = ""
    fast: bool = False


KINDS = [
    Kind(name="a decoder that projects one memory to keys and to values", net="Memory", fast=True),
    Kind(name="an input twice in nested containers and as keyword", net="Nested"),
    Kind(name="outputs of items that several later ones take", net="Skips"),
    Kind(name="weights tied between items", net="TiedItems"),
    Kind(name="an embedding tied with the head", net="TiedHead"),
    Kind(name="an item that is in the list twice", net="ListedTwice"),
    Kind(name="checkpointed items", net="Checkpointed"),
    Kind(
        name="re-entrantly checkpointed items",
        net="Reentrant",
        note="with `ordered` they stay gathered until the backward ends",
        fast=True,
    ),
    Kind(name="one item called several times", net="Albert", fast=True),
    Kind(
        name="one item called several times in a row (ALBERT)",
        net="AlbertInARow",
        note="with `ordered` they stay gathered from call to call",
        fast=True,
    ),
    Kind(name="lists inside lists", net="NestedLists"),
    Kind(name="lists and dicts as items of lists", net="ListsAsItems", fast=True),
    Kind(name="items in another order than they are listed", net="Backwards"),
    Kind(name="nn.Transformer", net="Transformer"),
    Kind(name="nn.MultiheadAttention", net="Attention"),
    Kind(name="frozen items", net="Frozen"),
    Kind(name="frozen items with trained adapters (LoRA)", net="Lora"),
    Kind(name="items without parameters", net="Bare"),
    Kind(name="ParameterList and ParameterDict", net="ParameterLists"),
    Kind(name="parameters of the model itself", net="RootParameters"),
    Kind(name="items that give dicts, tuples and None", net="Structures"),
    Kind(name="recurrent items", net="Recurrent"),
    Kind(name="parametrized items (weight normalisation)", net="WeightNorm"),
    Kind(name="single numbers as parameters", net="Scalars"),
    Kind(name="an item's loss kept as an attribute", net="Aside"),
    Kind(name="items called without gradients", net="Teacher"),
    Kind(name="items whose outputs the loss does not need", net="Unneeded"),
    Kind(name="a head that no batch uses, in a list", net="UnusedHead"),
    Kind(name="a U-Net", net="UNet"),
]
