"""Divides layers of known cost into stages, so that the slowest stage is as fast as can be.

It is exact, by dynamic programming over where stages end, and knows only numbers: measuring them is `measure`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from evenstep.errors import ArgumentError
from evenstep.tools.planning.simulate import Costs


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs, per micro-batch, in seconds and bytes.

    Args:
        activation_bytes: that it keeps from its forward to its backward.
        output_bytes: of what it gives to the next layer.
        state_bytes: that it holds all the time.
    """

    name: str
    forward_s: float
    input_backward_s: float
    weight_backward_s: float
    activation_bytes: float = 0
    output_bytes: float = 0
    state_bytes: float = 0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.input_backward_s + self.weight_backward_s


def balance(seconds: Sequence[float], stages: int) -> tuple[range, ...]:
    """The places of each stage's layers, such that the largest sum of `seconds` over a stage is the least possible.

    Of several such cuts it takes one whose stages' squares sum to the least: the most even one.

    >>> balance([3, 1, 1, 1, 2], 3)
    (range(0, 1), range(1, 3), range(3, 5))
    """
    count = len(seconds)
    if not 1 <= stages <= count:
        raise ArgumentError(f"{count} layers can't be cut into {stages} stages; give each stage one layer at least.")
    until = [0, *accumulate(seconds)]
    # best[n]: for the first n layers in so many stages, the largest stage, the sum of squares, and where stages begin
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *[None] * count]
    for stage in range(1, stages + 1):
        longer: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(stage, count + 1):
            candidates = [
                (max(before[0], size), before[1] + size * size, (*before[2], begin))
                for begin in range(stage - 1, end)
                if (before := best[begin]) is not None
                for size in [until[end] - until[begin]]
            ]
            longer[end] = min(candidates)
        best = longer
    found = best[count]
    assert found is not None, "there are layers enough"
    return tuple(range(begin, end) for begin, end in pairwise((*found[2], count)))


def stage_costs(
    layers: Sequence[LayerCost],
    cuts: Sequence[range],
    edges: Mapping[tuple[int, int], Sequence[int]],
    *,
    latency_s: float = 0,
    seconds_per_byte: float = 0,
) -> Costs:
    """The costs of stages that are made of layers.

    Args:
        cuts: the places of each stage's layers.
        edges: for each edge between stages the places of the layers whose outputs it carries.
    """
    stages = [[layers[place] for place in places] for places in cuts]
    return Costs(
        forward_s=tuple(sum(layer.forward_s for layer in stage) for stage in stages),
        input_backward_s=tuple(sum(layer.input_backward_s for layer in stage) for stage in stages),
        weight_backward_s=tuple(sum(layer.weight_backward_s for layer in stage) for stage in stages),
        activation_bytes=tuple(sum(layer.activation_bytes for layer in stage) for stage in stages),
        edge_bytes={edge: sum(layers[place].output_bytes for place in places) for edge, places in edges.items()},
        state_bytes=tuple(sum(layer.state_bytes for layer in stage) for stage in stages),
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
    )
