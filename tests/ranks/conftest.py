"""Makes the module beside the tests importable: the run that tests of launchers start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
