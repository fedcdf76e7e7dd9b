"""The context of what needs none: entered around each forward, backward and step of small models, so all in C.

`contextlib.nullcontext` calls two Python functions, which such a step feels.
"""

from contextlib import AbstractContextManager
from typing import Any, cast, final


@final
class _Nothing:
    __slots__ = ()
    __enter__ = [].clear  # a function of Python's own that takes nothing, does nothing, and gives None
    __exit__ = "".format  # one that takes everything and gives "", which says that an error goes on


NOTHING = cast("AbstractContextManager[Any]", _Nothing())
