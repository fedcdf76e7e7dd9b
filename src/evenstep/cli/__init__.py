"""The command `evenstep`."""

from evenstep.cli.entry import main as main
