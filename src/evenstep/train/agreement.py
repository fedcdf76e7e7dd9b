"""What all ranks must have in common before they train, so that their updates are one update.

Each rank describes what it was given, and all compare it with the first rank's. It is asked once, before training;
that ranks stay together while they train is the strategy's.
"""

from collections.abc import Mapping

import torch

from evenstep.data import Data
from evenstep.names import state_of
from evenstep.train.arguments import check_same_on_all_ranks
from evenstep.train.loop import Loop
from evenstep.train.state import unwrapped
from evenstep.version import __version__


def check_agreement(
    loop: Loop,
    *,
    tasks: list[str],
    evaluations: Mapping[str, Data],
    config: Mapping[str, object],
) -> None:
    """Raise ReplicaError unless all ranks are about to train the same; all ranks call it together.

    Args:
        loop: that will run.
        tasks: their names.
        evaluations: sets of data by name.
        config: of the run.
    """
    run: dict[str, object] = {
        "evenstep": __version__,
        "torch": torch.__version__,
        "seed": loop.seed,
        "precision": loop.precision.name,
        "update": loop.progress.update,
        "updates": loop.updates,
        "epochs": loop.epochs,
        "tasks": tasks,
        "data": loop.data.fingerprint(),
        "evaluations": {name: data.fingerprint() for name, data in evaluations.items()},
        "config": config,
    }
    check_same_on_all_ranks(loop.execution.group, run)
    # Ranks that hold different stages of a model agree with those that hold the same.
    shapes = {name: list(value.shape) for name, value in state_of(unwrapped(loop.model)).items()}
    check_same_on_all_ranks(loop.execution.strategy.group, {"model": shapes})
