"""`evenstep replay FAILURE`: runs the update again that a run has failed with, and shows where it fails.

The run is rebuilt from its folder, on whatever device and in whatever precision is asked for; parameters are those of
the last committed update, the batch is the one that was kept, and randomness is the same. Nothing is changed.
"""

from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import Any, cast, final

from evenstep.builders import build_parts, open_run
from evenstep.checkpoint import find_failure, read_checkpoint, step_name
from evenstep.cli.folder import BEGUN, IN_ONE_PROCESS, OWN, find_config
from evenstep.config.sources import from_arguments, settings_in, settings_of
from evenstep.errors import CheckpointError, ConfigError
from evenstep.events import BackwardBegin, Hook, MicrobatchBegin
from evenstep.exits import EXIT_DONE, EXIT_ERROR
from evenstep.frames import user_line
from evenstep.parallel import Single


@final
class Watch(Hook):
    """Remember how far the update came."""

    def __init__(self) -> None:
        self.place = "before its first micro-batch"

    def before_microbatch(self, event: MicrobatchBegin) -> None:
        self.place = f"in the forward of micro-batch {event.microbatch}"

    def before_backward(self, event: BackwardBegin) -> None:
        self.place = f"in the backward of micro-batch {event.microbatch}"


def run(path: str, settings: list[str]) -> int:
    """Run it again; gives 1 if it fails again."""
    where = find_failure(Path(path))
    folder = where.parent.parent
    failure = cast("dict[str, Any]", read_checkpoint(where).state["failure"])
    before = folder / "checkpoints" / step_name(failure["update"] - 1)
    if not before.is_dir():
        raise CheckpointError(
            f"update {failure['update']} has failed with the parameters after update {failure['update'] - 1}, but "
            f"`{folder}` holds no checkpoint of them: ranks that hold a part each, or step alone, leave parts, which a "
            f"resume puts together if all are there. Let it fail once more with a checkpoint of each update, "
            f"`evenstep resume {quote(str(folder))} --checkpoint.every_updates 1`, and repeat that."
        )
    state = read_checkpoint(before).state
    begun, alone = settings_in(BEGUN, str(folder)), settings_in(IN_ONE_PROCESS, "replay")
    given = settings_of(settings, without=OWN)
    if of_ranks := [one for one in from_arguments(settings) if one.path[0] in IN_ONE_PROCESS]:
        key = ".".join(of_ranks[0].path)
        raise ConfigError([f"`{key}` can't be set for `evenstep replay`, which runs in one process; leave it out."])
    # last, as the environment may be that of the ranks
    with open_run(find_config(folder), [*begun, *given, *alone]) as opened:
        parts = build_parts(opened, begins=False)
        with closing(parts):
            watch = Watch()
            trainer = parts.trainer(hooks=[watch], strategy=Single())
            print(f"failure     {where}: {failure['error']}\nparameters  {before}", flush=True)
            print(
                f"replay      update {failure['update']} on {trainer.device}, {opened.config.train.precision}",
                flush=True,
            )
            try:
                found = trainer.replay(state, failure)
            except Exception as error:  # noqa: BLE001 - to show it is what the command is for
                print(f"it fails    {watch.place}: {_described(error)}")
                return EXIT_ERROR
    if found:
        print(f"it fails    {found}")
        return EXIT_ERROR
    print("it does not fail: all outputs and all gradients are finite, and nothing was raised")
    return EXIT_DONE


def _described(error: Exception) -> str:
    notes = " ".join(note for note in getattr(error, "__notes__", []) if "\n" not in note)
    line = user_line(error)
    at = f" (raised at {line})" if line else ""
    return f"{type(error).__name__}: {error}{at} {notes}".rstrip()
