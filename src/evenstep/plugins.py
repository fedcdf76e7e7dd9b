"""What is loaded only where a run asks for it, by the name under which it is listed.

The core trains; what not every run needs (the report page, lost ranks, gradient methods of several tasks) lives in
`evenstep.tools` and `evenstep.contrib`, which the core never imports. It knows those parts by name only, as it knows a
user's own `mine.py:Writer`, and loads them when they are asked for.
"""

from importlib import import_module
from typing import Any

from evenstep.errors import MissingExtraError

REPORT = "evenstep.tools.report:write_report"
REPORT_FILE = "report.html"
ELASTIC = "evenstep.contrib.elastic"
PER_TASK_GRADIENTS = "evenstep.contrib.multitask.per_task:PerTaskGradients"
COMBINES = "evenstep.contrib.multitask:COMBINES"
COMPUTES = {"update": "evenstep.contrib.compiled_update"}
"""The packages that compute updates, by the words of `Training.compile`; see `evenstep.train.compute`."""


def load(target: str) -> Any:
    """The object that `target`, "module:name", means.

    >>> load("math:floor")(1.5)
    1
    """
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def load_optional(module: str, extra: str, library: str = "") -> Any:
    """A module of a library that is installed with one of evenstep's extras, or that itself needs `library`.

    Raises:
        MissingExtraError: the library is not installed, or lacks what is imported of it, as an earlier one may.

    >>> load_optional("nowhere", "hf")
    Traceback (most recent call last):
    evenstep.errors.MissingExtraError: `nowhere` is needed for this but is not installed; install it with `pip ...
    """
    library = library or module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        if str(error.name).partition(".")[0] != library:
            raise
        raise MissingExtraError(library, extra) from error
