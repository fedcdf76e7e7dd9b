"""evenstep: a PyTorch training engine in which one update is one update.

The parameters after update u depend on the model, the data order, the seed and u, and on nothing else: not on how the
global batch was cut into micro-batches, nor on what failed or was stopped in between.

`__init__.pyi` is the table of public names, for type checkers and for Python. A name is imported when it is first used,
so that `evenstep --help` does not wait for torch.
"""

import sys
from importlib import import_module

from evenstep.version import __version__ as __version__

if sys.platform == "win32":
    raise ImportError("evenstep does not run on Windows: it needs POSIX signals, locks and processes; use WSL 2.")

_PARTS = ("checkpoint", "contrib", "data", "errors", "events", "optim", "parallel", "pipeline", "precision", "train")
_NOT_STARRED = (*_PARTS, "Image", "Text")  # scripts have such names, too
_SEARCHED = ("contrib.multitask", "data", "events", "optim.schedules", "parallel", "pipeline", "precision", "train")


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return import_module(f"evenstep.{name}")
    from pathlib import Path

    from evenstep.lazy import homes_in, lazy_names

    homes = homes_in(Path(__file__).with_suffix(".pyi"))
    if name == "__all__":
        names = " ".join(homes.values()).split()
        return sorted(one for one in names if one not in _NOT_STARRED)
    try:
        return lazy_names(__name__, homes)[0](name)
    except AttributeError:
        for part in _SEARCHED if name[:1].isupper() else ():
            if hasattr(import_module(f"evenstep.{part}"), name):
                text = f"module 'evenstep' has no attribute '{name}'; it is `evenstep.{part}.{name}`."
                raise AttributeError(text) from None
        raise


def __dir__() -> list[str]:
    return sorted([*__getattr__("__all__"), *_NOT_STARRED])  # type: ignore[misc]
