"""`compile = "update"`: an update as one compiled graph of forwards, backwards, norm, clip, optimizer and average.

It is for models so small that launching kernels takes most of the time. `check` and `build` are the seam of
`evenstep.train.build`.
"""

from evenstep.contrib.compiled_update.checks import check, check_hooks
from evenstep.contrib.compiled_update.update import CompiledUpdate
from evenstep.train.build import Parts

__all__ = ["build", "check"]


def build(parts: Parts) -> CompiledUpdate:
    """The compiled update of an engine.

    Raises:
        ArgumentError: a hook listens to something inside of an update.
    """
    check_hooks(parts.context.bus.hooks)
    return CompiledUpdate(parts)
