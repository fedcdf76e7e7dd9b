"""Command lines as programs of ranks, which `launched.on_ranks` starts."""

import contextlib
import io
import os
import sys
from pathlib import Path


def command(folder: str, *arguments: str) -> tuple[int, str, str]:
    """Run one in `folder`; gives exit code, standard output and standard error."""
    from evenstep.cli import main

    os.chdir(folder)
    sys.path[:] = [place for place in sys.path if Path(place) != Path(folder)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()
