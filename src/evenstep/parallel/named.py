"""Strategies by the names that run files and scripts use, and the ranks that a launcher has started, joined once."""

import os

import torch

from evenstep.arguments import choose
from evenstep.errors import ArgumentError
from evenstep.parallel.blocks import BLOCKS
from evenstep.parallel.fsdp import Fsdp
from evenstep.parallel.group import Group
from evenstep.parallel.processes import Processes
from evenstep.parallel.rank_info import rank_info_of
from evenstep.parallel.strategies import Ddp, Reduction, Single, Strategy, Zero1

STRATEGIES = {name: name for name in ("auto", "single", "ddp", "fsdp", "zero1")}
_JOINED: dict[torch.device, Group] = {}  # a process can join the others only once


def strategy_named(
    name: str,
    group: Group,
    *,
    reduction: Reduction = "ordered",
    blocks: int = BLOCKS,
    shard_ranks: int | None = None,
    gather_dtype: torch.dtype | None = None,
    offload: bool = False,
    wire_dtype: torch.dtype | None = None,
) -> Strategy:
    """Strategy by name. One rank shares nothing, whatever the strategy.

    Args:
        name: one of `STRATEGIES`; "auto" is ddp.
        reduction, blocks: of `Strategy`.
        shard_ranks, gather_dtype, offload: of `Fsdp`.
        wire_dtype: of `Ddp`.

    Raises:
        ArgumentError: there is no such strategy, or it is for one rank.

    >>> type(strategy_named("ddp", Group())).__name__
    'Single'
    """
    name = choose("strategy", name, STRATEGIES)
    if group.ranks == 1 or name == "single":
        return Single(group, reduction=reduction, blocks=blocks)
    if name == "fsdp":
        return Fsdp(
            group,
            shard_ranks=shard_ranks,
            gather_dtype=gather_dtype,
            offload=offload,
            reduction=reduction,
            blocks=blocks,
        )
    kind = Zero1 if name == "zero1" else Ddp
    return kind(group, reduction=reduction, blocks=blocks, wire_dtype=wire_dtype)


def check_single(strategy: str, ranks: int, *, has_hooks: bool) -> None:
    """Raise ArgumentError for several ranks with the strategy for one, where no hook can average their models."""
    if strategy == "single" and ranks > 1 and not has_hooks:
        raise ArgumentError(
            f'`strategy` is "single", but there are {ranks} ranks; set it to another, or start one process.',
            field="strategy",
        )


def launched_group(device: torch.device) -> Group:
    """The ranks that a launcher has started, for as long as this process lives; a group of one where none has.

    Raises:
        EvenstepError: the others did not come in time.
    """
    info = rank_info_of(os.environ)
    if info is None or info.ranks == 1:
        return Group()
    if device not in _JOINED:
        _JOINED[device] = Processes(device)
    return _JOINED[device]


def device_of_rank(name: str) -> torch.device:
    """The device by this name; "auto" and "cuda" are one accelerator for each rank, where a machine has several.

    >>> device_of_rank("cpu")
    device(type='cpu')
    """
    info = rank_info_of(os.environ)
    if name in ("auto", "cuda") and info is not None and torch.cuda.is_available():
        return torch.device("cuda", info.local_rank % torch.cuda.device_count())
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
