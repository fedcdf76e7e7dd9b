"""`python -m evenstep` is the command `evenstep`."""

import sys

from evenstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
