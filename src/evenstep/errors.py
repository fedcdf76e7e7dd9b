"""Every error that evenstep raises on purpose, one tree, one file.

An error's text is for the person who must act: what was, what must be, what to do. It is not for our own
invariants, which are `assert`s, nor for faults that training survives, which are `Incident` events.

    EvenstepError
    ├── ArgumentError (also ValueError)    an argument of the library that cannot be
    │   └── ConfigError                    faults of a run file, environment or command line; exit code 2
    ├── DataError                          a dataset, sampler or loader that fails
    ├── TaskError                          a task or model that does not do what an update needs
    ├── NonFiniteError (also ArithmeticError)  a loss or gradient that is inf or NaN, or a loss scale at its floor
    ├── OutOfMemoryError (also MemoryError)  what does not fit into memory, however finely it is cut
    ├── PlanError                          a plan that is not a complete, ordered update
    ├── CheckpointError                    a checkpoint that cannot be written, found, trusted or fitted
    ├── ReplicaError                       ranks that should hold the same and do not
    ├── LostRankError                      another rank that failed, froze or never came
    ├── HookError                          a hook or writer that is not one
    └── MissingExtraError (also ImportError)   an optional dependency that is not installed
"""

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EvenstepError",
    "HookError",
    "LostRankError",
    "MissingExtraError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PlanError",
    "ReplicaError",
    "TaskError",
]


class EvenstepError(Exception):
    """Base of all errors that evenstep raises on purpose.

    Args:
        field: the argument, key or name that the error is about; "" for none.

    >>> EvenstepError("`clip_norm` must be above 0.", field="clip_norm").field
    'clip_norm'
    """

    def __init__(self, *args: object, field: str = "") -> None:
        super().__init__(*args)
        self.field = field


class ArgumentError(EvenstepError, ValueError):
    """An argument that cannot be: the message names it, its value, and what is allowed."""


class ConfigError(ArgumentError):
    """All faults of a configuration at once.

    Args:
        faults: one sentence per fault, each beginning with its key path.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class DataError(EvenstepError):
    """A dataset, sampler or loader that fails: the message names the sample."""


class TaskError(EvenstepError):
    """A task or a model that does not do what an update needs."""


class NonFiniteError(EvenstepError, ArithmeticError):
    """A loss or gradient that is inf or NaN and that the run's policy does not let pass."""


class OutOfMemoryError(EvenstepError, MemoryError):
    """Something that does not fit into memory, however finely it is cut."""


class PlanError(EvenstepError):
    """A plan that is not a complete, ordered update; raised before anything runs."""


class CheckpointError(EvenstepError):
    """A checkpoint that cannot be written, found, trusted, or fitted to this run."""


class ReplicaError(EvenstepError):
    """Ranks that should hold the same and do not: parameters, configurations, data; the message names the ranks."""


class LostRankError(EvenstepError):
    """Another rank failed, froze or never came: the message names it, and what was waited for."""


class HookError(EvenstepError):
    """A hook or a writer that is not one: a misspelt method, two of one name, a lost trainer."""


class MissingExtraError(EvenstepError, ImportError):
    """An optional dependency that is not installed; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"`{package}` is needed for this but is not installed; install it with `pip install 'evenstep[{extra}]'`."
        )


_LONGEST = 20_000  # characters of a text of others, which may hold a whole tensor or file


def keepable(text: str) -> str:
    r"""What others have raised, as files and other ranks can take it: in UTF-8, and without the middle of what is long.

    Bytes of a file's name that are not UTF-8 are written out.

    >>> keepable("caf\udce9.png")
    'caf\\udce9.png'
    >>> len(keepable("x" * 3_000_000))
    20044
    """
    if left_out := max(len(text) - _LONGEST, 0):
        half = _LONGEST // 2
        text = f"{text[:half]}\n… {left_out:,} characters are left out here …\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def clause(error: BaseException | str) -> str:
    """What an error says, as a part of a sentence of ours: its type and its text, without a full stop at the end.

    >>> clause(ValueError("no such file.")), clause(TimeoutError()), clause("the disk is full.")
    ('ValueError: no such file', 'TimeoutError', 'the disk is full')
    """
    text = keepable(str(error)).rstrip().rstrip(".")
    if isinstance(error, str):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
