"""Runs a function on several ranks, as a user's script under torchrun would, without importing torch once per rank.

    results = on_ranks(2, train, "fsdp")        # train must be a function of a module, not of a test's body
    [reference] = on_ranks(1, train, "single")

Ranks are forked from one server process that has imported torch and evenstep and has run nothing. A rank that raises
gives a `Failed` with the type and text of its error; ranks that hang are killed and give a `Failed` that says so.
"""

import faulthandler
import gc
import hashlib
import multiprocessing
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

from torch import Tensor

_PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.default_planner",
    "torch._dynamo",
    "evenstep.cli.check",
    "evenstep.cli.entry",
    "evenstep.cli.train",
    "evenstep.train.agreement",
    "evenstep.train.checks",
    "evenstep.train.build",
    "evenstep.train.build_loop",
    "evenstep.train.evaluate",
    "evenstep.train.ledger",
    "evenstep.train.ending",
    "evenstep.train.trainer",
    "evenstep.pipeline",
    "evenstep.pipeline.schedules",
    "evenstep.parallel",
    "torch.distributed.launcher",
    "torch.utils._sympy.reference",
    "evenstep.tools.prove",
    "evenstep.tools.report",
    "jinja2",
    "rich.console",
]


class Failed(str):
    """What a rank raised: "TypeOfError: its text"."""

    __slots__ = ()


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, env: Mapping[str, str] | None = None
) -> list[Any]:
    """What `function(*args)` gave on each of so many ranks, or `Failed`.

    Args:
        ranks: how many; 1 runs without the variables of a launcher.
        function: of an importable module; arguments and results are pickled.
        args: of the function.
        timeout_s: after which what still runs is killed.
        env: further environment variables.
    """
    context = server()
    port = free_port()
    running = {}
    for rank in range(ranks):
        launcher = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        mine, theirs = context.Pipe(duplex=False)
        variables = {**(launcher if ranks > 1 else {}), **(env or {})}
        process = context.Process(target=_run, args=(theirs, variables, function, args), daemon=True)
        process.start()
        theirs.close()
        running[mine] = rank, process
    results: list[Any] = [Failed(f"hung: still running after {timeout_s:g} s")] * ranks
    deadline = time.monotonic() + timeout_s
    waiting = set(running)
    while waiting and time.monotonic() < deadline:
        for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            rank, process = running[connection]
            waiting.discard(connection)
            try:
                failed, value = connection.recv()
                results[rank] = Failed(value) if failed else value
            except EOFError:
                process.join(10)
                results[rank] = Failed(f"exit {process.exitcode}: ended without a result")
    for connection, (_, process) in running.items():
        process.join(0 if connection in waiting else 20)
        if process.is_alive():
            process.kill()
            process.join()
        connection.close()
    return results


def server() -> Any:
    """The context of processes that are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def begin() -> None:
    """Make this process, which was forked from the server, what a script's process is, with one thread of torch's."""
    import torch

    gc.freeze()  # what the server has imported stays: a collection need not go through it
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch would take its operators back one by one, which shows nothing
    faulthandler.enable()
    # as in a script: what the rank starts, such as a loader's workers, is forked from it, and ends with it
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)


def _run(connection: Any, variables: Mapping[str, str], function: Callable[..., Any], args: Any) -> None:
    begin()
    os.fsync = lambda descriptor: (os.fstat(descriptor), None)[1]  # as in pytest's own process
    os.environ.pop("_EVENSTEP_LAUNCHER", None)  # the server may have begun while a test had set it
    os.environ.update(variables)
    try:
        message = False, function(*args)
    except Exception as error:  # noqa: BLE001 - the caller gets it
        import traceback

        traceback.print_exc()
        message = True, f"{type(error).__name__}: {error}"
    connection.send(message)
    connection.close()
    os._exit(0)


def group_of_ranks(timeout_s: float = 40.0) -> Any:
    """The group of the ranks that were launched; None in a run of one process."""
    import torch

    from evenstep.parallel import Processes

    return Processes(torch.device("cpu"), timeout_s=timeout_s) if "RANK" in os.environ else None


def strategy_named(name: str, group: Any) -> Any:
    """A strategy by name: "ddp", "zero1", "fsdp", "hybrid" (shards of two ranks), with "ordered-" before it or alone.

    With no group it is that of one process, ordered or not.
    """
    from evenstep.parallel import Ddp, Fsdp, Single, Zero1

    ordered = name.startswith("ordered")
    kind = name.removeprefix("ordered").lstrip("-") or "ddp"
    reduction: Any = "ordered" if ordered else "fast"
    if group is None:
        return Single(reduction=reduction)
    if kind in ("fsdp", "hybrid"):
        return Fsdp(group, shard_ranks=2 if kind == "hybrid" else None, reduction=reduction)
    return (Zero1 if kind == "zero1" else Ddp)(group, reduction=reduction)


def digest(tree: Any) -> str:
    """A sha256 over names, formats, shapes and bytes of all tensors of a tree."""
    sha = hashlib.sha256()

    def walk(path: str, item: Any) -> None:
        if isinstance(item, Mapping):
            for name in sorted(item, key=str):
                walk(f"{path}/{name}", item[name])
        elif isinstance(item, tuple | list):
            for place, one in enumerate(item):
                walk(f"{path}/{place}", one)
        elif isinstance(item, Tensor):
            import torch

            plain = item.detach().cpu().contiguous()
            sha.update(f"{path}:{plain.dtype}:{tuple(plain.shape)}".encode())
            sha.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        else:
            sha.update(f"{path}={item!r}".encode())

    walk("", tree)
    return sha.hexdigest()
