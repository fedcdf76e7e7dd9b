"""Give something to each of several receivers, whatever the earlier ones raised.

The first error is the one that counts; the later ones are attached to it as notes, so that an error while tidying
up never hides what went wrong. This raises nothing itself: the caller decides when.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Receiver: TypeAlias = tuple[str, Callable[..., Any]]


def deliver(
    receivers: Iterable[Receiver], *arguments: object, error: BaseException | None = None
) -> BaseException | None:
    """Call every receiver with `arguments`; return `error`, or else the first error that one of them raised.

    Args:
        receivers: each with the name that a note calls it by.
        arguments: given to every receiver.
        error: what is in flight already, if anything.

    >>> error = deliver([("a", int), ("b", print), ("c", len)], 2.5, error=ValueError("the first"))
    2.5
    >>> error, error.__notes__
    (ValueError('the first'), ["Then c raised TypeError: object of type 'float' has no len()"])
    """
    try:
        for name, receive in receivers:
            try:
                receive(*arguments)
            except BaseException as raised:  # noqa: BLE001 - not lost: the caller raises the first, with the rest
                if error is None:
                    error = raised
                elif raised is not error:
                    error.add_note(f"Then {name} raised {type(raised).__name__}: {raised}")
        return error
    finally:
        del error  # the error's traceback holds this frame: keeping it here would be a cycle
