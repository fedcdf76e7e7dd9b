"""The commands of the tools: their arguments and help. Importing this loads neither torch nor a tool."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option, Typer

from evenstep.cli.arguments import RunFile, call, with_settings

app = Typer()


@app.command(**with_settings())
def prove(
    ctx: Context,
    run: RunFile,
    rows: Annotated[
        str, Option(metavar="TEXT", help="Run only tests whose name contains TEXT; several separated by commas.")
    ] = "",
    updates: Annotated[int, Option(min=1, metavar="N", help="Number of updates to compare.")] = 4,
    ranks: Annotated[int, Option(min=2, metavar="N", help="Number of ranks in tests with several.")] = 2,
    json: Annotated[Path | None, Option(metavar="FILE", help="Also write all results to this file, as JSON.")] = None,
) -> int:
    """Test that cuts, ranks, kills and resumes keep a result.

    Repeats a small copy of the run in each way and compares the results.
    """
    return call("evenstep.tools.prove.command:run", run, ctx.obj, rows=rows, updates=updates, ranks=ranks, json=json)


@app.command(**with_settings())
def plan(
    ctx: Context,
    run: Annotated[
        Path | None,
        Argument(metavar="RUN.toml", help="The run file whose model is measured; else every computation takes 1 ms."),
    ] = None,
    ranks: Annotated[
        int | None, Option(min=1, metavar="N", help="Pipeline ranks; by default the run's `parallel.pipeline`.")
    ] = None,
    microbatches: Annotated[
        int | None, Option(min=1, metavar="N", help="Micro-batches of an update; by default the run's.")
    ] = None,
    memory_gib: Annotated[
        float | None, Option(min=1e-9, metavar="GIB", help="Memory of a rank, in GiB; unlimited by default.")
    ] = None,
    schedule: Annotated[
        str | None,
        Option(metavar="NAME", help="Schedule to write: a name from the table, or a file; the best by default."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="Also write the schedule: .json as a trace for Perfetto, else as a plan."),
    ] = None,
) -> int:
    """Compare pipeline schedules.

    Costs are measured of a run's model, or every computation takes 1 ms.
    """
    return call(
        "evenstep.tools.planning.command:run",
        run,
        ctx.obj,
        ranks=ranks,
        microbatches=microbatches,
        memory_gib=memory_gib,
        schedule=schedule,
        out=out,
    )


@app.command()
def report(
    runs: Annotated[
        list[Path], Argument(metavar="RUN_FOLDER...", help="The run folder; several are compared on one page.")
    ],
    to: Annotated[
        Path | None,
        Option(metavar="FILE", help="The file to write; by default report.html in the run folder or around several."),
    ] = None,
    follow: Annotated[
        bool, Option("--follow", help="Serve the page to browsers on this machine, always up to date, until Ctrl-C.")
    ] = False,
) -> int:
    """Write an HTML report of runs, or serve it."""
    return call("evenstep.tools.report.follow:run", runs, to=to, follow=follow)
