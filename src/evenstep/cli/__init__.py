"""The command `evenstep`: one module per subcommand, imported only when it is called."""

from evenstep.cli.entry import main

__all__ = ["main"]
