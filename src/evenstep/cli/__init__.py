"""The command `evenstep`: one module per subcommand, imported only when it is called."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, also where Ctrl-C comes before it is imported or after its end.

    Args:
        arguments: without the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    try:
        from evenstep.cli.entry import main as run

        return run(arguments)
    except KeyboardInterrupt:
        from evenstep.process import EXIT_INTERRUPTED

        print("evenstep: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
