"""Table of the optimizers that ranks may share: by elements (`fsdp`), by whole parameters (`zero1`, stages), or not.

A part of a model is stepped exactly only if the optimizer's result for it depends on nothing else. Torch's own classes
are each tested to the bit; other classes declare it.
"""

from torch import optim
from torch.optim import Optimizer

from evenstep.optim.optimizers import parts_of

ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
    *(optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD),
)
"""Torch's classes, without their subclasses, that step each element by itself."""

PARAMETERWISE = (
    optim.Rprop,  # torch has no kernels for shards
    optim.Adafactor,  # takes means over rows and columns
    optim.Muon,  # orthogonalises whole matrices
    optim.SparseAdam,  # torch has no kernels for shards
)
"""Those that step each parameter by itself."""

NO_FUSED_SHARDS = (optim.Adagrad, optim.SGD)
"""Classes whose fused kernels take no shards."""

TORCHAO = tuple(
    f"torchao.optim.adam.{name}" for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
)
"""Torchao's classes by name, parameterwise: their state is in blocks of elements, which shards would cut elsewhere."""


def is_torchs(optimizer: Optimizer) -> bool:
    """True for a class of torch in the table, which steps each of its parameters by itself."""
    return type(optimizer) in (*ELEMENTWISE, *PARAMETERWISE)


def shard_refusal(optimizer: Optimizer, *, elements: bool) -> str:
    """Reason why ranks can't share what an optimizer steps, by elements or by whole parameters; "" if they can.

    A class declares `elementwise = True` or `parameterwise = True` in its own body, since subclasses may differ. The
    attribute may also be one of the object.
    """
    for one in parts_of(optimizer):
        kind, name = type(one), type(one).__name__
        is_known = is_torchs(one) or f"{kind.__module__}.{kind.__qualname__}" in TORCHAO
        own = {**vars(kind), **vars(one)}
        declares = own.get("elementwise") is True or (own.get("parameterwise") is True and not elements)
        if not (kind in ELEMENTWISE or (is_known and not elements) or declares):
            word = "element" if elements else "parameter"
            if is_known:
                return f"{name} does not step each {word} by itself"
            return f"{name} is unknown: if it steps each {word} by itself, say `{word}wise = True` in its class"
        if elements and kind in NO_FUSED_SHARDS and any(group.get("fused") for group in one.param_groups):
            return f"torch has no fused {name} for shards; build it with `foreach=True`"
    return ""
