"""`evenstep average RUN --last N`: writes a checkpoint of the mean of a run's weights."""

from pathlib import Path

from evenstep.checkpoint.averaging import average_checkpoints, averages_of, last_checkpoints
from evenstep.cli.arguments import whole_number
from evenstep.errors import ConfigError
from evenstep.process import EXIT_DONE


def run(path: str, settings: list[str], *, last: str | None, until: str | None, to: str | None) -> int:
    assert not settings, "the command line takes none"
    folder = Path(path)
    if last is None:
        raise ConfigError(["give `--last N` to average the newest N checkpoints."])
    count = whole_number("--last", last, at_least=2)
    of = last_checkpoints(folder, count, until=None if until is None else whole_number("--until", until, at_least=0))
    name = f"last-{count}-{of[-1].name}"
    target = averages_of(folder) / name if to is None else Path(to)
    made = average_checkpoints(of, target.parent, name=target.name)
    print(f"averaged    {', '.join(one.name for one in made.of)}")
    print(f"weights     the mean of {made.averaged} tensors; {made.same} are the same in all")
    if made.newest:
        print(f"integers    have no mean; of {made.of[-1].name}, the newest: {', '.join(made.newest)}")
    if made.not_finite:
        print(f"not finite  inf in all of them: {', '.join(made.not_finite)}")
    print(f"checkpoint  {made.path}")
    return EXIT_DONE
