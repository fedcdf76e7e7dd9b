"""What is loaded only where a run asks for it, by the name under which it is listed.

The core trains; what no run needs (the report page, planning, gradient methods of several tasks) lives in
`evenstep.extras`, which the core never imports. It knows those parts by name only, as it knows a user's own
`mine.py:Writer`, and loads them when they are asked for. This is not a registry: nothing is registered on import.
"""

from importlib import import_module
from typing import Any

REPORT = "evenstep.extras.report:write_report"
PER_TASK_GRADIENTS = "evenstep.extras.multitask.per_task:PerTaskGradients"
COMBINES = "evenstep.extras.multitask:COMBINES"


def load(target: str) -> Any:
    """The object that `target`, "module:name", means.

    >>> load("math:floor")(1.5)
    1
    """
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
