"""The options of `evenstep plan`.

Costs may stand in a file, too, under the same names; what the command line says is stronger. It computes nothing.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any, final

from evenstep.errors import ConfigError

DRAWINGS = ("text", "trace", "plan", "torch")


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be asked of a plan."""

    ranks: int = _option(0, "number of pipeline ranks; by default the run's `parallel.pipeline`")
    microbatches: int = _option(0, "micro-batches per update; by default as in the run's first update")
    stages_per_rank: int = _option(2, "stages per rank, for schedules that allow any number; 2 by default")
    memory_gib: float = _option(0.0, "memory limit of a rank, in GiB; none by default")
    costs: str = _option("", "a TOML file with the nine costs below (_ for -), or one [[layers]] table per layer")
    forward_ms: float = _option(
        1.0, "forward of one micro-batch through one rank's share of the model, in ms; 1 by default"
    )
    input_backward_ms: float = _option(1.0, "its backward with respect to inputs, in ms; 1 by default")
    weight_backward_ms: float = _option(1.0, "its backward with respect to weights, in ms; 1 by default")
    activation_mib: float = _option(0.0, "activations that it keeps from forward to backward, in MiB")
    deferred_mib: float = _option(-1.0, "part of them kept until the backward of weights, in MiB; all by default")
    state_mib: float = _option(0.0, "parameters, gradients and optimizer state of one rank, in MiB")
    message_mib: float = _option(0.0, "size of a message from one stage to the next, in MiB")
    latency_us: float = _option(0.0, "latency of each message, in microseconds")
    gib_per_s: float = _option(0.0, "bandwidth between ranks, in GiB/s; unlimited by default")
    schedule: str = _option("", "schedule to draw: a name from the table, or a file with one; the best by default")
    draw: str = _option("text", f"format of the drawing: {', '.join(DRAWINGS)}; text by default")
    out: str = _option("", "file to write the drawing to; by default it is printed")
    width: int = _option(100, "characters per line of the text drawing; 100 by default")


FIELDS: Mapping[str, "Field[Any]"] = {f"--{each.name.replace('_', '-')}": each for each in fields(Options)}
SHARE_KEYS = (
    "forward_ms",
    "input_backward_ms",
    "weight_backward_ms",
    "activation_mib",
    "deferred_mib",
    "state_mib",
    "message_mib",
)
COST_KEYS = (*SHARE_KEYS, "latency_us", "gib_per_s")


def help_text() -> str:
    """One line per option.

    >>> help_text().splitlines()[0]
    "  --ranks               number of pipeline ranks; by default the run's `parallel.pipeline`"
    """
    return "\n".join(f"  {name:<21} {each.metadata['meaning']}" for name, each in FIELDS.items())


def checked(option: str, text: str) -> int | float | str:
    """The value that `text` says of an option, such as "--ranks".

    Raises:
        ConfigError: it isn't of the option's kind.
    """
    kind: Any = type(FIELDS[option].default)
    if kind is str:
        if option == "--draw" and text not in DRAWINGS:
            close = get_close_matches(text, DRAWINGS, n=1)
            advice = f"; did you mean {close[0]}?" if close else "."
            raise ConfigError(
                [f"`{option}` must be {', '.join(DRAWINGS[:-1])} or {DRAWINGS[-1]}, but is {text}{advice}"]
            )
        return text
    what, least = ("a whole number", 1) if kind is int else ("a number", 0)
    try:
        number: int | float = kind(text)
    except ValueError:
        raise ConfigError([f"`{option}` must be {what}, but is {text}."]) from None
    if not isfinite(number) or number < least:
        raise ConfigError([f"`{option}` must be {what} of at least {least}, but is {text}."])
    return number
