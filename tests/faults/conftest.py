"""Makes the modules beside the tests importable: the injector, the ranks and the battery."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
