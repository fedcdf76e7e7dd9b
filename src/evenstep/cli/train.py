"""`evenstep train RUN.toml`: trains a run in a new folder."""

from pathlib import Path

from evenstep.builders import joined, open_run
from evenstep.cli.folder import check_free, folder_of, where_to_begin
from evenstep.cli.launch import start_ranks, submit_run
from evenstep.cli.training import train_in
from evenstep.config.sources import settings_of
from evenstep.parallel.rank_info import is_launched


def run(path: str, settings: list[str]) -> int:
    """Train it."""
    with open_run(Path(path), settings_of(settings)) as opened:
        config = opened.config
        folder = folder_of(config)
        if config.launch.slurm is not None and not is_launched():
            if config.resume != "auto":
                check_free(folder)
            # a job that was stopped is queued again, and then goes on
            again = [*settings, "--launch.slurm", "none"]
            if config.resume == "never":
                again += ["--resume", "auto"]
            logs = folder.with_name(f"{folder.name}-slurm")
            return submit_run(config.launch.slurm, ["train", path, *again], name=config.name, folder=logs)
        source = None
        if not is_launched():  # refused before any rank is started
            source = where_to_begin(config.resume, folder, config.checkpoint.mirror)
        code = start_ranks(config, ["train", path, *settings])
        if code is not None:
            return code
        with joined(config) as group:
            if source is None:
                source = group.first_rank_does(lambda: where_to_begin(config.resume, folder, config.checkpoint.mirror))
            return train_in(opened, folder, source or "never", group)  # who has not met the first rank learns no more
