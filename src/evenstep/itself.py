"""The command line that starts evenstep in another process, as this one was started. It starts nothing."""

import sys


def command() -> list[str]:
    """Python and its arguments before those of `evenstep`.

    `python -m` puts the working directory before the standard library, and the command `evenstep` does not: there a
    file of a recipe such as `queue.py` is in nobody's way, so that it must not be in that of the ranks either.
    """
    as_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return [sys.executable, *([] if as_module else ["-P"]), "-m", "evenstep"]
