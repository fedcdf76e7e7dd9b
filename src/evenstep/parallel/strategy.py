"""How gradients and parameters are shared between data-parallel ranks.

A strategy has few verbs, and every reduction is a plain SUM, because each loss is divided by the weight of the whole
update before its backward. The defaults here do nothing, which is what one rank needs. It is not a wrapper around
the training loop: the update calls the verbs, and asks nothing about which strategy it has.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast, final

import torch
from torch import Tensor, nn

from evenstep.parallel.buffers import Before
from evenstep.parallel.group import Group

T = TypeVar("T")
States = Mapping[str, Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Owned:
    """A tensor that one rank keeps.

    Args:
        local: its values there; elsewhere a tensor without elements, of the same dtype.
        size: its shape, on all ranks.
    """

    local: Tensor
    size: tuple[int, ...]


def mapped(tree: Any, act: Callable[[Tensor], Any]) -> Any:
    """The same dicts, lists and tuples, with `act(tensor)` in the place of each tensor.

    >>> mapped({"step": 3, "last": [torch.ones(1), torch.zeros(2)]}, len)
    {'step': 3, 'last': [1, 2]}
    """
    if isinstance(tree, Tensor):
        return act(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, act) for key, value in cast("dict[Any, Any]", tree).items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, act) for value in tree)
    return tree


class Spoiled(Exception):
    """What the ranks do together must not be used, and all begin it again: one of them ran out of memory.

    Args:
        fault: the traceback, where it was this rank.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.fault = fault


class Strategy(ABC):
    """The verbs between an update and its data-parallel ranks.

    Args:
        group: the ranks, through which they also agree; a group of one by default.

    Attributes:
        collects: whether each micro-batch's gradients are taken out of `.grad` by `collect`.
        cuts_alone: whether a rank may run its micro-batches in more pieces than its peers do.
        in_turn: whether all ranks must run micro-batches of one kind at the same time.
        gathers_per_plan: whether plans begin with UNSHARD and end with RESHARD.
        divides: what is dealt out between ranks, each of which steps its share only: whole parameters, or the elements
            of each.
    """

    collects: bool = False
    cuts_alone: bool = False
    in_turn: ClassVar[bool] = False
    gathers_per_plan: bool = False
    divides: Literal["nothing", "parameters", "elements"] = "nothing"

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Group()

    @property
    def rank(self) -> int:
        """This process's number among the data-parallel ranks."""
        return self.group.rank

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks there are."""
        return self.group.ranks

    @property
    def part_held(self) -> tuple[int, int]:
        """Which part of the state this rank holds without asking the others, and of how many."""
        return 0, 1

    @property
    def retries_alone(self) -> bool:
        """Whether this rank may now begin its accumulation anew without its peers: nothing was given to them yet."""
        return self.cuts_alone

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to call in place of `module`; its parameters keep their names."""
        return module

    def begin(self, module: Callable[..., Any]) -> None:
        """The accumulation of an update begins, perhaps anew after a failed try: forget what was collected."""

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        """Take part in what the peers do up to their reduction, so that they raise `Spoiled` and begin anew as well.

        Called, with `.grad` empty, when this rank has failed where it does not retry alone.

        Args:
            module: whose.
            num_microbatches: of the update, over all ranks.
            error: what to raise where the peers can't be told, as when they are in the midst of other collectives.
        """
        raise error

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """After `wrap`: let `optimizer` hold the parameters that this rank steps."""

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on these parameters' gradients are summed, and no others'; after `adopt`, and between updates.

        Args:
            parameters: those that are trained, in the module's order; the same on all ranks.
        """

    def match(
        self,
        work: Sequence[T],
        run: Callable[[T], None],
        *,
        halve: Callable[[T], T | None],
        backward: bool,
        kind: str = "",
        last: bool = True,
    ) -> None:
        """Before an update's or an evaluation's passes: run more, where all ranks must run the same number.

        Args:
            work: this rank's micro-batches, or what they are cut into.
            run: runs a micro-batch without a trace: no metrics, no changed buffers. What it adds to gradients is
                the strategy's to remove.
            halve: gives half of a micro-batch, or None where it can't be cut.
            backward: whether passes come back.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: whether no passes of another kind follow in this accumulation.
        """

    def follow(self) -> None:
        """This rank has failed before the last kind's passes: take part in those that the peers still make of this one.

        `match` without work is called for each kind that is left, and then `spoil`.
        """

    def any_failed(self, failed: bool) -> bool:
        """After an evaluation's passes: whether they must be run again, since this rank or one that shares them failed.

        One that has failed takes part in what the peers still do.
        """
        return failed

    def gather(self, module: Callable[..., Any]) -> None:
        """A plan begins (UNSHARD): have all that forwards and backwards of `module` need."""

    def release(self, module: Callable[..., Any]) -> None:
        """A plan has ended (RESHARD): keep of `module` what is this rank's only."""

    def arm(self, module: Callable[..., Any]) -> None:
        """The next backward of `module` is its last of this update: gradients may be reduced as they appear."""

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        """The backward of `microbatch` has just added its gradients to those of `module`."""

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        """Return when the gradients of `module` are summed over all ranks, or will be before they are read.

        Args:
            module: whose.
            num_microbatches: of the update, over all ranks.

        Raises:
            Spoiled: a peer has failed; nothing of the sum may be used.
        """

    def share_buffers(self, before: Before) -> None:
        """After an update's passes: make equal on all ranks the buffers that their forwards have changed.

        Args:
            before: the buffers as of the last committed update.
        """

    def squared_norm(self, gradients: list[Tensor], norms: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """‖g‖₂² over all parameters and their shards, the same on every rank.

        Args:
            gradients: this rank's, complete.
            norms: gives the norm of each of some tensors, as one tensor.
        """
        each = norms(gradients)
        return each.dot(each)

    def explained(self, error: Exception) -> Exception:
        """What an error of torch's in a pass means with this strategy; `error` itself if nothing more is known."""
        return error

    def facing(self, gradient: Tensor) -> Tensor:
        """What of a reduced gradient this rank takes inner products of. All ranks ask for the same ones in order."""
        return gradient

    def over_shards(self, products: Tensor) -> None:
        """Sum inner products of what ranks were `facing`, in place, where those are parts of gradients."""

    def each_norm(self, gradients: list[Tensor], norms: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """‖g‖₂ of each gradient, whole, the same on every rank; `squared_norm` asks it of a model in stages.

        Args:
            gradients: this rank's, complete, perhaps in shards.
            norms: gives the norm of each of some tensors, as one tensor.
        """
        return norms(gradients)

    def after_step(self) -> None:
        """The optimizer has made its step on this rank: parameters that others stepped may be fetched."""

    def after_update(self, update: int) -> None:
        """Called after `update` was committed: for strategies that share parameters instead of gradients."""

    def abandon(self) -> None:
        """Forget what an update that has raised in the middle has left behind."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which this rank may hold a shard. Every rank must ask for the same ones in order."""
        return tensor

    def part(self, live: Tensor, whole: Tensor) -> Tensor:
        """What of `whole` this rank holds, shaped as `live`, which it will replace."""
        return whole

    def all_states(self, states: States) -> States:
        """The optimizer state of all parameters by name, from this rank's."""
        return states

    def kept_states(self, states: States) -> States:
        """The same without moving anything: tensors that one rank alone keeps are `Owned`."""
        return states

    def uncompressed(self) -> AbstractContextManager[str]:
        """Inside, gradients are summed in full, to find out why a sum was not finite; gives what to say if it then is.

        >>> with Strategy().uncompressed() as advice:
        ...     advice
        ''
        """
        return nullcontext("")
