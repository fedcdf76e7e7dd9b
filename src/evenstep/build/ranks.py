"""The ranks of a run: who else trains it, on which device, and how they share gradients.

Whether there are others is the launcher's word (RANK, WORLD_SIZE, LOCAL_RANK in the environment), how they share is
the configuration's.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch

from evenstep.config.schema import Config
from evenstep.errors import ConfigError
from evenstep.parallel import Ddp, Group, Ordered, Processes, Single, Strategy


@contextmanager
def joined(config: Config) -> Generator[Group]:
    """The group of all ranks of this run inside the `with`.

    Raises:
        ConfigError: several ranks with a strategy for one.
        EvenstepError: the others did not come in time.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and config.parallel.strategy == "single":
        raise ConfigError(
            [f"`parallel.strategy` is single, but {ranks} ranks were started; set it to ddp, or start one process."]
        )
    group = Processes(rank_device(config), timeout_s=config.parallel.timeout_s) if ranks > 1 else Group()
    try:
        yield group
    except BaseException as error:
        group.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        group.close()


def rank_device(config: Config) -> torch.device:
    """The device of this rank: one accelerator each, where a machine has several."""
    name = config.device
    if name in ("auto", "cuda") and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def build_strategy(config: Config, group: Group) -> Strategy:
    """How gradients are shared: in a fixed order if asked for, else as fast as the number of ranks allows."""
    if config.parallel.reduction == "ordered":
        return Ordered(group)
    return Ddp(group) if group.ranks > 1 or config.parallel.strategy == "ddp" else Single(group)
