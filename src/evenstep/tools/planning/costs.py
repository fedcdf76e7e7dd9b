"""What `evenstep plan` lets plans cost: numbers of one rank's share, a file of them, or layers.

Layers are divided into stages anew for each number of stages. It draws nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, cast, final

from evenstep.arguments import advice
from evenstep.config.sources import read_file
from evenstep.errors import ConfigError
from evenstep.pipeline import Layout
from evenstep.tools.planning.balance import LayerCost, balance, stage_costs
from evenstep.tools.planning.options import COST_KEYS, Options
from evenstep.tools.planning.simulate import Costs

MIB, GIB = 2**20, 2**30
_LAYER_KEYS = {
    "forward_ms": ("forward_s", 1e-3),
    "input_backward_ms": ("input_backward_s", 1e-3),
    "weight_backward_ms": ("weight_backward_s", 1e-3),
    "activation_mib": ("activation_bytes", MIB),
    "output_mib": ("output_bytes", MIB),
    "state_mib": ("state_bytes", MIB),
}
Flows = Callable[[Sequence[range]], Mapping[tuple[int, int], Sequence[int]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layered:
    """A model as layers of known cost.

    Args:
        flows: gives the edges between stages, and which layers' outputs they carry, for the places of their layers.
    """

    layers: tuple[LayerCost, ...]
    flows: Flows

    def cut(self, stages: int) -> tuple[range, ...]:
        """The most balanced stages."""
        return balance([layer.seconds for layer in self.layers], stages)


def costs_of(options: Options, layered: Layered | None, layout: Layout) -> tuple[Layout, Costs]:
    """The layout with the edges of the model, and what its stages cost.

    Args:
        layered: the model, or None for even shares.
        layout: a chain.

    Raises:
        ArgumentError: the model has fewer layers than there are stages.
    """
    latency_s = options.latency_us * 1e-6
    seconds_per_byte = 1 / (options.gib_per_s * GIB) if options.gib_per_s else 0.0
    if layered is not None:
        cuts = layered.cut(layout.stages)
        edges = layered.flows(cuts)
        layout = Layout(rank_of=layout.rank_of, edges=tuple(edges))
        return layout, stage_costs(layered.layers, cuts, edges, latency_s=latency_s, seconds_per_byte=seconds_per_byte)
    return layout, Costs.even(
        layout,
        forward_s=options.forward_ms * 1e-3,
        input_backward_s=options.input_backward_ms * 1e-3,
        weight_backward_s=options.weight_backward_ms * 1e-3,
        activation_bytes=options.activation_mib * MIB,
        deferred_bytes=None if options.deferred_mib < 0 else options.deferred_mib * MIB,
        edge_bytes=options.message_mib * MIB,
        state_bytes=options.state_mib * MIB,
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
    )


def read_costs(path: Path) -> tuple[dict[str, Any], Layered | None]:
    """The options that a file of costs gives, and its layers if it has any.

    Raises:
        ConfigError: with all that is wrong.
    """
    tree = read_file(path)
    faults: list[str] = []
    layers: list[LayerCost] = []
    tables: Any = tree.pop("layers", [])
    given = _numbers(tree, (*COST_KEYS, "layers"), "", path, faults)
    for number, table in enumerate(cast("list[Any]", tables) if isinstance(tables, list) else [tables]):
        if not isinstance(table, dict):
            faults.append(f"`layers` in {path} must be [[layers]] tables, but number {number} is {table}.")
            continue
        row = cast("dict[str, Any]", table)
        name = str(row.pop("name", number))
        found = _numbers(row, ("name", *_LAYER_KEYS), f"layers.{number}.", path, faults)
        costs: dict[str, Any] = dict.fromkeys(("forward_s", "input_backward_s", "weight_backward_s"), 0.0)
        for key, value in found.items():
            field, unit = _LAYER_KEYS[key]
            costs[field] = value * unit
        layers.append(LayerCost(name=name, **costs))
    if faults:
        raise ConfigError(faults)
    return given, Layered(layers=tuple(layers), flows=chained) if layers else None


def _numbers(
    table: Mapping[str, Any], keys: Sequence[str], outer: str, path: Path, faults: list[str]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in table.items():
        if key not in keys:
            faults.append(f"`{outer}{key}` in {path} is not a cost; {advice(key, keys)}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            faults.append(f"`{outer}{key}` in {path} must be a number of at least 0, but is {value}.")
        else:
            found[key] = float(value)
    return found


def chained(cuts: Sequence[range]) -> dict[tuple[int, int], tuple[int, ...]]:
    """The edges of stages that feed the next one only.

    >>> chained([range(0, 2), range(2, 5), range(5, 6)])
    {(0, 1): (1,), (1, 2): (4,)}
    """
    return {(stage, stage + 1): (places[-1],) for stage, places in enumerate(cuts[:-1])}
