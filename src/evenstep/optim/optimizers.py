"""Several optimizers over one model, modes of schedule-free ones, and the classes that ranks may share.

Ranks share by elements (`fsdp`) or by whole parameters (`zero1`, stages). A part is stepped exactly only if its result
depends on nothing else; torch's own classes are each tested to the bit.
"""

from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import has_state_hooks
from evenstep.tensors import parameters_in

Group = dict[str, Any]


@final
class Optimizers:
    """Groups and state of several optimizers, in their order. Only the `Stepper` steps them.

    ArgumentError if a parameter is in two optimizers, or an optimizer has its own `state_dict`.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        owners: dict[int, Optimizer] = {}
        for one in parts:
            name = type(one).__name__
            if has_own_state_dict(one):
                raise ArgumentError(
                    f"optimizers of a tuple save their `state`, but {name} has its own `state_dict`; leave it out.",
                    field="optimizer",
                )
            for parameter in parameters_in(one):
                owner = owners.setdefault(id(parameter), one)
                if owner is not one:
                    raise ArgumentError(
                        f"each parameter must have one optimizer, but one of shape {list(parameter.shape)} is in "
                        f"{type(owner).__name__} and in {name}; give each parameter to one of them.",
                        field="optimizer",
                    )
        self.parts = tuple(parts)
        self.defaults: Group = parts[-1].defaults

    @property
    def param_groups(self) -> list[Group]:
        return [group for one in self.parts for group in one.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:
        """State by parameter, to read."""
        return ChainMap(*(one.state for one in self.parts))

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the last optimizer."""
        self.parts[-1].add_param_group(param_group)


def joined(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """A tuple of optimizers as one; an optimizer itself."""
    if not isinstance(optimizer, list | tuple):
        return cast("Optimizer", optimizer)
    return cast("Optimizer", Optimizers([part for one in optimizer for part in parts_of(one)]))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers of a tuple, or the optimizer itself."""
    given = cast("Optimizer | Optimizers", optimizer)
    return given.parts if isinstance(given, Optimizers) else (given,)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    return has_state_hooks(optimizer) or type(optimizer).state_dict is not Optimizer.state_dict


def moded(optimizer: Optimizer) -> list[Any]:
    """The optimizers that train one set of parameters and evaluate another: schedule-free ones, `train` and `eval`."""
    return [one for one in parts_of(optimizer) if all(callable(getattr(one, mode, None)) for mode in ("train", "eval"))]


@torch.no_grad()
def set_mode(optimizer: Optimizer, mode: Literal["train", "eval"], fetch: Callable[[], None] | None = None) -> None:
    """Put in the parameters to train or to evaluate; `fetch` gets those that other ranks have changed."""
    optimizers = moded(optimizer)
    for one in optimizers:
        getattr(one, mode)()
    if optimizers and fetch is not None:
        fetch()


@contextmanager
def evaluating(optimizer: Optimizer, parameters: Iterable[Tensor], fetch: Callable[[], None]) -> Generator[None]:
    """Inside, the model has the parameters to evaluate. Afterwards it has its former bits."""
    # a way back by arithmetic would round
    kept = [(one, one.detach().clone()) for one in parameters] if moded(optimizer) else []
    set_mode(optimizer, "eval", fetch)
    try:
        yield
    finally:
        set_mode(optimizer, "train", fetch)
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


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
    """True for a class of torch in the lists above."""
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
