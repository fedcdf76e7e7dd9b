"""`evenstep train RUN.toml`: trains a run in a new folder."""

import os
from functools import partial
from pathlib import Path

from evenstep.build import joined
from evenstep.checkpoint import complete_checkpoints
from evenstep.cli.folder import check_free
from evenstep.cli.lasting import launch_lasting
from evenstep.cli.launch import is_rank, is_restarted, launch
from evenstep.cli.orphans import end_with_parent
from evenstep.cli.slurm import submit
from evenstep.cli.training import train_in
from evenstep.config.load import open_run
from evenstep.config.sources import from_arguments, from_environment


def run(path: str, settings: list[str]) -> int:
    """Train it."""
    with open_run(Path(path), [*from_environment(os.environ), *from_arguments(settings)]) as opened:
        config = opened.config
        folder = Path(config.runs) / config.name
        if config.launch.slurm is not None and not is_rank():
            if config.resume != "auto":
                check_free(folder)
            # a job that was stopped is queued again, and then goes on
            again = ["--launch.slurm", "none", *(["--resume", "auto"] if config.resume == "never" else [])]
            logs = Path(config.runs) / f"{config.name}-slurm"
            return submit(config.launch.slurm, ["train", path, *settings, *again], name=config.name, folder=logs)
        ranks = max(config.launch.ranks, config.parallel.pipeline)
        if ranks > 1 and not is_rank():
            start = launch
            if config.failures.lost_rank == "continue":
                start = partial(launch_lasting, timeout_s=config.parallel.timeout_s)
            return start(ranks, ["train", path, *settings], max_restarts=config.launch.max_restarts)
        if is_rank():
            end_with_parent()
        with joined(config) as group:
            source = group.first_rank_does(lambda: _source(config.resume, folder))
            return train_in(opened, folder, source or "never", group)  # who has not met the first rank learns no more


def _source(resume: str, folder: Path) -> str:
    """What to begin from: for ranks that are started again, what they have saved before, if anything."""
    if is_restarted():
        return "auto" if resume == "never" or complete_checkpoints(folder / "checkpoints") else resume
    if resume != "auto":
        check_free(folder)
    return resume
