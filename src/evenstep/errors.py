"""All errors that evenstep raises on purpose, in one tree.

The text of an error says what was, what must be, and what to do. Faults that training survives are `Incident` events.
"""


class EvenstepError(Exception):
    """Base of all errors that evenstep raises on purpose; `field` is the argument, key or name that it is about."""

    def __init__(self, *args: object, field: str = "") -> None:
        super().__init__(*args)
        self.field = field


class ArgumentError(EvenstepError, ValueError):
    """A wrong argument; the message has its name, its value and what is allowed."""


class ConfigError(ArgumentError):
    """All faults of a configuration at once, one sentence each, which begins with its key."""

    def __init__(self, faults: list[str] | str) -> None:
        self.faults = [faults] if isinstance(faults, str) else faults
        super().__init__("\n".join(self.faults))


class DataError(EvenstepError):
    """A dataset, sampler or loader that fails: the message names the sample."""


class TaskError(EvenstepError):
    """A task or a model that breaks its contract with the engine."""


class NonFiniteError(EvenstepError, ArithmeticError):
    """A loss or gradient that is inf or NaN, with the policy to stop."""


class OutOfMemoryError(EvenstepError, MemoryError):
    """No memory, however small the pieces."""


class PlanError(EvenstepError):
    """A plan that is no complete, ordered update; raised before anything runs."""


class CheckpointError(EvenstepError):
    """A checkpoint that can't be written, found, trusted or loaded."""


class ReplicaError(EvenstepError):
    """Ranks with different parameters, settings or data; the message names the ranks."""


class LostRankError(EvenstepError):
    """Another rank that failed, froze or never came; the message names it and the operation."""


class HookError(EvenstepError):
    """A wrong hook or writer: a misspelt method, two of one name, another trainer's."""


class MissingExtraError(EvenstepError, ImportError):
    """An optional dependency that is not installed; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"`{package}` is needed for this but is not installed; install it with `pip install 'evenstep[{extra}]'`."
        )


_HALF = 10_000  # characters; the text of a foreign error may hold a whole tensor or file


def keepable(text: str) -> str:
    """A text of a foreign error in UTF-8, without its middle if it is long, for files and other ranks."""
    left_out = len(text) - 2 * _HALF
    if left_out > 0:
        text = f"{text[:_HALF]}\n… {left_out:,} characters are left out here …\n{text[-_HALF:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def clause(error: BaseException | str) -> str:
    """Type and text of an error as a part of a sentence, without a full stop."""
    text = keepable(str(error)).rstrip().rstrip(".")
    if isinstance(error, str):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
