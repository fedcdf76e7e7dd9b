"""Which hook this thread is in: messages about other ranks name it, and one that only this rank hears may need none.

What a rank does alone and the others would have to do as well would wait for them until the timeout; so it is refused
as soon as it comes to a collective. It does not know what a hook is: that is said by whoever calls one.
"""

from collections.abc import Generator
from contextlib import contextmanager
from threading import local

from evenstep.errors import HookError


class _Here(local):
    what = ""
    is_alone = False


_here = _Here()


@contextmanager
def inside(what: str, *, alone: bool) -> Generator[None]:
    """Within it, this thread is in `what`.

    Args:
        alone: whether no other rank comes to it.

    >>> with inside("`after_update` of hook `Mine`", alone=False):
    ...     where_inside()
    ', in `after_update` of hook `Mine`'
    >>> where_inside()
    ''
    """
    before = _here.what, _here.is_alone
    _here.what, _here.is_alone = what, alone or _here.is_alone
    try:
        yield
    finally:
        _here.what, _here.is_alone = before


def where_inside() -> str:
    """What this thread is in, as the end of a sentence; "" where that is not said."""
    return f", in {_here.what}" if _here.what else ""


def check_others_come() -> None:
    """Raise HookError where this thread is in something that no other rank comes to."""
    if _here.is_alone:
        raise HookError(
            f"{_here.what} is called on the first rank only (`first_rank_only`), but does what all ranks must do "
            f"together, such as a forward of a model in shards, an evaluation or a norm, and the others never come; "
            f"leave `first_rank_only` out, and print or write where `self.trainer.is_first_rank`."
        )
