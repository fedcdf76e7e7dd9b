"""Tasks drawn at random, in proportion to their data or flatter.

With n_t the batches per epoch of task t (or the weights given) and temperature T,

    p_t = n_t^(1/T) / Σ_s n_s^(1/T)

so T = 1 is proportional, and T → ∞ draws all tasks alike. Draw d of global batch b is seeded from (seed, b, d) and
from nothing else.

Reference: Arivazhagan et al., "Massively multilingual neural machine translation in the wild", 2019 (temperature).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import final

from evenstep.arguments import require_count, require_number, require_table
from evenstep.data.batch import JSON
from evenstep.data.mixing.mixing import Mixing, check_known
from evenstep.errors import ArgumentError
from evenstep.keys import key


@final
class Sampled(Mixing):
    """Tasks at random.

    Args:
        temperature: T of the formula, above 0.
        weights: n_t of the formula; the tasks' batches per epoch by default.
        draws: how many batches an update takes, each drawn by itself.

    Raises:
        ArgumentError: a number that cannot be.

    >>> mixing = Sampled()
    >>> names = [mixing(number, {"class": 30, "box": 10}, seed=1)[0] for number in range(1000)]
    >>> 720 < names.count("class") < 780
    True
    """

    def __init__(self, *, temperature: float = 1.0, weights: Mapping[str, float] | None = None, draws: int = 1) -> None:
        require_number("temperature", temperature, "(0, inf)", "finite and above 0", "1 is proportional")
        for name, weight in require_table("weights", weights, "`weights={'box': 2.0}`", may_be_none=True).items():
            require_number(f"weights[{name!r}]", weight)
            if not 0 < weight < math.inf:
                raise ArgumentError(f"`weights` of task `{name}` must be finite and above 0, but is {weight}.")
        self._temperature = float(temperature)
        self._weights = dict(weights or {})
        self._draws = require_count("draws", draws)

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        names = list(sizes)
        # relative to the largest, so that a small temperature overflows nothing
        logs = [math.log(self._weights.get(name, sizes[name])) / self._temperature for name in names]
        edges = list(accumulate(math.exp(log - max(logs)) for log in logs))
        return sorted(
            (names[_place(edges, key(seed, "mixture", number, draw))] for draw in range(self._draws)), key=names.index
        )

    def check(self, tasks: Sequence[str]) -> None:
        check_known("weights", self._weights, tasks)
        if self._weights and len(self._weights) != len(tasks):
            missing = next(name for name in tasks if name not in self._weights)
            raise ArgumentError(f"`weights` of task `{missing}` must be given, since other tasks have one.")

    def fingerprint(self) -> dict[str, JSON]:
        return {
            "kind": "sampled",
            "temperature": self._temperature,
            "weights": dict(self._weights),
            "draws": self._draws,
        }


def _place(edges: list[float], drawn: int) -> int:
    """Where a 63-bit number falls among cumulative weights."""
    point = drawn / 2**63 * edges[-1]
    return next((place for place, edge in enumerate(edges) if point < edge), len(edges) - 1)
