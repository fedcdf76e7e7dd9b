"""The commands: their arguments and help. The modules that carry them out are imported when a command runs.

Exit codes: 0 done; 1 an error; 2 a run file or command line that cannot be; 75 stopped by a signal and saved, to be run
again; 130 Ctrl-C.
"""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Exit, Option, Typer

from evenstep.cli.arguments import RunFile, RunFolder, call, with_settings
from evenstep.lazy import load
from evenstep.version import __version__

app = Typer(
    name="evenstep",
    help="Train PyTorch models: one update is one update, however the hardware cuts it.",
    epilog="Exit codes: 0 done, 1 error, 2 wrong run file or command line, 75 stopped by a signal or a time limit and "
    "saved (continue with `evenstep resume`), 130 Ctrl-C.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"evenstep {__version__}")
        raise Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    traceback: Annotated[
        bool, Option("--traceback", help="Show the full traceback of an error. May stand after any command.")
    ] = False,
) -> None:
    """Options without a command; `evenstep.cli.entry` reads them."""


@app.command(**with_settings())
def train(ctx: Context, run: RunFile) -> int:
    """Train a run."""
    return call("evenstep.cli.train:train", run, ctx.obj)


@app.command(**with_settings())
def demo(ctx: Context) -> int:
    """Train a small language model on Python's own source.

    Takes about 3 minutes.
    """
    return call("evenstep.cli.tools:demo", ctx.obj)


@app.command()
def new(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The folder to create; its name becomes the run's name.")],
    recipe: Annotated[str, Option("--from", metavar="RECIPE", help="The recipe to copy, such as digits.")] = "",
) -> int:
    """Copy a recipe into a new folder."""
    return call("evenstep.cli.tools:new", folder, recipe)


@app.command(**with_settings("changes a key that past updates do not depend on, such as --train.updates 100"))
def resume(ctx: Context, run: RunFolder) -> int:
    """Continue a run from its newest checkpoint."""
    return call("evenstep.cli.train:resume", run, ctx.obj)


@app.command(**with_settings())
def check(ctx: Context, run: RunFile) -> int:
    """Check a run file, build the run and try one update.

    Writes nothing.
    """
    return call("evenstep.cli.check:check", run, ctx.obj)


@app.command(**with_settings())
def summary(
    ctx: Context, run: RunFile, depth: Annotated[int, Option(min=1, metavar="N", help="Levels of modules to show.")] = 3
) -> int:
    """Show a model's modules, parameters and output shapes.

    Writes nothing.
    """
    return call("evenstep.cli.tools:summary", run, ctx.obj, depth)


@app.command("find-lr", **with_settings())
def find_lr(
    ctx: Context,
    run: RunFile,
    lowest: Annotated[float, Option(metavar="LR", help="The first learning rate.")] = 1e-7,
    highest: Annotated[float, Option(metavar="LR", help="The last learning rate.")] = 1.0,
    tries: Annotated[int, Option(metavar="N", help="Number of updates.")] = 100,
) -> int:
    """Try learning rates and suggest one.

    Makes updates at rates from small to large. Writes nothing.
    """
    return call("evenstep.cli.tools:try_rates", run, ctx.obj, lowest=lowest, highest=highest, tries=tries)


@app.command()
def inspect(
    checkpoint: Annotated[
        Path, Argument(metavar="CHECKPOINT", help="A checkpoint, or a run folder with its newest checkpoint.")
    ],
    verify: Annotated[bool, Option("--verify", help="Read every byte and verify all checksums.")] = False,
) -> int:
    """Show what is in a checkpoint."""
    return call("evenstep.cli.checkpoints:inspect", checkpoint, verify=verify)


@app.command()
def average(
    run: RunFolder,
    last: Annotated[int, Option(min=2, metavar="N", help="Average the N newest checkpoints.")],
    until: Annotated[int | None, Option(min=0, metavar="UPDATE", help="Ignore checkpoints after this update.")] = None,
    to: Annotated[
        Path | None, Option(metavar="FOLDER", help="The folder to write; by default one in the run's `averages`.")
    ] = None,
) -> int:
    """Average the weights of a run's last checkpoints."""
    return call("evenstep.cli.checkpoints:average", run, last=last, until=until, to=to)


@app.command()
def export(
    path: Annotated[
        Path, Argument(metavar="RUN_FOLDER", help="A checkpoint, or a run folder with its newest checkpoint.")
    ],
    to: Annotated[Path, Option(metavar="FILE", help="The file to write, such as model.safetensors.")],
    average: Annotated[
        bool, Option("--average", help="Write the moving average (EMA) of the parameters instead of the parameters.")
    ] = False,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        Option(metavar="FORMAT", help="Format of floating-point weights: fp32, bf16 or fp16; by default as saved."),
    ] = None,
    layout: Annotated[
        Literal["hf"] | None, Option(metavar="NAME", help="hf: write a folder for `from_pretrained` of transformers.")
    ] = None,
    tokenizer: Annotated[
        Path | None, Option(metavar="FOLDER", help="With --layout hf: also copy the tokenizer in this folder.")
    ] = None,
) -> int:
    """Write a run's weights as a safetensors file."""
    return call(
        "evenstep.cli.checkpoints:export", path, to=to, average=average, dtype=dtype, layout=layout, tokenizer=tokenizer
    )


@app.command("config-schema")
def config_schema() -> int:
    """Print the JSON schema of run files."""
    return call("evenstep.cli.tools:print_schema")


TOOLS = ("evenstep.tools.commands:app",)  # by name: each is a Typer app with further commands
for _tool in TOOLS:
    app.add_typer(load(_tool))
