"""evenstep: a PyTorch training engine in which one update is one update.

The parameters after update u depend on the model, the data order, the seed and u, and on nothing else: not on how the
global batch was cut into micro-batches, nor on what failed or was stopped in between.

`__init__.pyi` is the table of public names, for type checkers and for Python. A name is imported when it is first used,
so that `evenstep --help` does not wait for torch.
"""

import sys

from evenstep.lazy import lazy_names
from evenstep.version import __version__ as __version__

if sys.platform == "win32":
    raise ImportError("evenstep does not run on Windows: it needs POSIX signals, locks and processes; use WSL 2.")

_PARTS = ("checkpoint", "contrib", "data", "errors", "events", "optim", "parallel", "pipeline", "precision", "train")
_NOT_STARRED = (*_PARTS, "Image", "Text")  # scripts have such names, too

_NAMES, __getattr__, __dir__ = lazy_names(__name__)
__all__ = [name for name in _NAMES if name not in _NOT_STARRED]  # pyright: ignore[reportUnsupportedDunderAll]
