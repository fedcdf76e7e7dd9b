"""Rendezvous of the ranks of a run: each registers at rank 0's machine and waits for all others.

A rank that sees a fault writes it to the store, so that every rank raises the same error.
"""

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep

import torch

from evenstep.arguments import first_of
from evenstep.errors import EvenstepError, ReplicaError
from evenstep.internals import PrefixStore, Store, TCPStore
from evenstep.parallel.rank_info import RankInfo, this_process
from evenstep.version import __version__

_ALL = "all"  # " " once all have come, else why they cannot go on
_LINGER_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.2  # between two looks for the others
_TRY_S = 5.0  # to reach rank 0


def meet(info: RankInfo, *, timeout_s: float) -> Store:
    """Wait for all ranks; gives the store through which they go on to find each other."""
    until = monotonic() + timeout_s
    at = f"{info.address}:{info.port}"
    served = _connected(info, at, timeout_s)
    # a launcher's store keeps keys of earlier attempts
    store = PrefixStore(f"evenstep/{info.attempt}/{info.ranks}" if info.store_is_served else "evenstep", served)
    try:
        fault = _announce(store, info) or _wait(store, info, at, timeout_s=timeout_s, left_s=until - monotonic())
        if fault:
            _let_others_read(store, info)
    except (RuntimeError, ValueError) as error:  # torch's DistError and its kin
        raise EvenstepError(
            f"{info} met the others at {at}, but then rank 0, where all meet, was gone: {_first_line(error)} Look at "
            f"the first error of the others."
        ) from error
    if fault:
        raise (ReplicaError if fault.startswith("all ranks must") else EvenstepError)(f"{info}: {fault}")
    return PrefixStore("group", store)


def _connected(info: RankInfo, at: str, timeout_s: float) -> Store:
    serves = info.rank == 0 and not info.store_is_served
    try:
        if not serves and not wait_until(lambda: _listens(info), timeout_s, longest_s=_LONGEST_PAUSE_S):
            raise TimeoutError("no answer")
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(
            info.address, info.port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        what = f"could not listen at {at}" if serves else f"found nobody listening at {at} within {timeout_s:g} s"
        raise EvenstepError(
            f"{info} {what}: {_first_line(error)} MASTER_ADDR must be rank 0's machine, and MASTER_PORT a free port of "
            f"it; set both alike on all ranks, and let no firewall stand between."
        ) from error


def _listens(info: RankInfo) -> bool:
    """True if rank 0 listens; torch's store would log every try, and no signal ends its wait."""
    try:
        with socket.create_connection((info.address, info.port), timeout=_TRY_S) as tried:
            return tried.getsockname() != tried.getpeername()  # a port that is free may be given to the one who asks
    except OSError:
        return False


def _announce(store: Store, info: RankInfo) -> str:
    terms = {"WORLD_SIZE": str(info.ranks), "evenstep": __version__, "torch": torch.__version__}
    me = f"rank {info.rank} ({this_process()})"
    first = json.loads(store.compare_set("terms", "", json.dumps({"who": me, "terms": terms})))
    for name, value in terms.items():
        other = first["terms"].get(name)
        if other != value:
            fault = f"all ranks must be started alike, but {name} is {value} for {me} and {other} for {first['who']}."
            return _say(store, fault) or fault  # the others may have gone on: then it is this rank's alone
    store.set(f"rank {info.rank}", me)
    return _say(store, "") if store.add("came", 1) == info.ranks else ""


def _wait(store: Store, info: RankInfo, at: str, *, timeout_s: float, left_s: float) -> str:
    if wait_until(lambda: store.check([_ALL]), left_s, longest_s=_LONGEST_PAUSE_S):
        return store.get(_ALL).decode().strip()
    missing = [rank for rank in range(info.ranks) if not store.check([f"rank {rank}"])]
    came = [store.get(f"rank {rank}").decode() for rank in range(info.ranks) if rank not in missing]
    return _say(
        store,
        f"rank{'s' * (len(missing) > 1)} {first_of(missing, 16)} of {info.ranks} did not come to {at} within "
        f"{timeout_s:g} s; {first_of(came, 16)} came. Look at what the missing ones say, and at WORLD_SIZE.",
    )


def wait_until(found: Callable[[], bool], timeout_s: float, *, longest_s: float) -> bool:
    """Wait until something is found, looking at least every `longest_s`; True if it was in time.

    The store's own wait hears no signal, and torch warns on standard error when it ends without.
    """
    until, pause_s = monotonic() + timeout_s, _FIRST_PAUSE_S
    while not found():
        if monotonic() > until:
            return False
        sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True


def _say(store: Store, fault: str) -> str:
    return store.compare_set(_ALL, "", fault or " ").decode().strip()  # the store takes "" for no value


def _let_others_read(store: Store, info: RankInfo) -> None:
    store.add("read", 1)
    until = monotonic() + _LINGER_S
    if info.rank == 0 and not info.store_is_served:
        while store.add("read", 0) < store.add("came", 0) and monotonic() < until:
            sleep(0.02)
        sleep(0.1)  # the last answer may be on its way


def _first_line(error: BaseException) -> str:
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line if line.endswith(".") else f"{line}."
