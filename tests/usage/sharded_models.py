"""Kinds of models under `fsdp`: the table that the battery walks, and from which docs can be generated.

Each works to the bit (`ordered-fsdp` against `ordered` on one process; `fsdp` up to the order of summation), or is
refused by name. The models are in `sharded_models_nets`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Args:
        name: in words.
        net: the class in `sharded_models_nets`.
        refused: what the error says; "" where it works.
        note: for readers of the table.
        fast: whether it is in the fast suite.
    """

    name: str
    net: str
    refused: str = ""
    note: str = ""
    fast: bool = False


_APART = "agreed on before each gather, as ranks run other items"

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
    Kind(name="experts that only some ranks run", net="Experts", note=_APART),
    Kind(name="experts of other sizes", net="UnequalExperts", note=_APART, fast=True),
    Kind(name="blocks left out at random (LayerDrop)", net="LayerDrop", note=_APART, fast=True),
    Kind(name="blocks left out at random, checkpointed", net="CheckpointedLayerDrop", note=_APART),
    Kind(name="depth that grows with the updates", net="Growing", note=_APART),
    Kind(name="items in another order than they are listed", net="Backwards"),
    Kind(name="items in another order, left out at random", net="BackwardsLayerDrop", note=_APART),
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
    Kind(name="a head that no batch uses, in a list", net="UnusedHead", note=_APART),
    Kind(name="a U-Net", net="UNet"),
    Kind(
        name="items in another order from some update on",
        net="Shuffled",
        refused="comes to 'blocks.0' in its forward, where the first such pass came to nothing more",
    ),
    Kind(
        name="an item's parameter used without calling the item",
        net="Borrowed",
        refused="the model uses a parameter (in `features`, sharded_models_nets.py:",
    ),
    Kind(name="another method of an item than forward", net="OtherMethod", refused="'blocks.0.linear.weight'"),
    Kind(
        name="gradients of gradients (`create_graph=True`)",
        net="Forces",
        refused="a gradient can't be differentiated once more",
    ),
    Kind(
        name="parameters that are not contiguous",
        net="Transposed",
        refused="parameter 'blocks.0.weight' must be contiguous",
    ),
    Kind(
        name="an item's output, a view, changed in place", net="InPlace", refused="that is a view be changed in place"
    ),
    Kind(name="a forward that writes to its weights", net="Clamping", refused="writes to the parameter `blocks.0.wei"),
    Kind(name="one that writes to their `data`", net="ClampingData", refused="writes to the parameter `blocks"),
    Kind(name="trained parameters without elements", net="Empty"),
]
