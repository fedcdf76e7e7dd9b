"""`evenstep average RUN --last N`: writes a checkpoint of the mean of a run's weights."""

from pathlib import Path

from evenstep.checkpoint.averaging import average_checkpoints, averages_of, last_checkpoints
from evenstep.process import EXIT_DONE


def run(folder: Path, *, last: int, until: int | None, to: Path | None) -> int:
    of = last_checkpoints(folder, last, until=until)
    name = f"last-{last}-{of[-1].name}"
    target = averages_of(folder) / name if to is None else to
    made = average_checkpoints(of, target.parent, name=target.name)
    print(f"averaged    {', '.join(one.name for one in made.of)}")
    print(f"weights     the mean of {made.averaged} tensors; {made.same} are the same in all")
    if made.newest:
        print(f"integers    have no mean; of {made.of[-1].name}, the newest: {', '.join(made.newest)}")
    if made.not_finite:
        print(f"not finite  inf in all of them: {', '.join(made.not_finite)}")
    print(f"checkpoint  {made.path}")
    return EXIT_DONE
