"""Cuts layers into stages and says which stage feeds which.

A stage is a contiguous run of layers; an output goes once to every stage with a layer that takes it.
"""

from collections.abc import Sequence
from itertools import pairwise

from evenstep.errors import ArgumentError
from evenstep.pipeline.layers import Layers


def cut(layers: Layers, *, stages: int, split_at: Sequence[str] | None = None) -> tuple[range, ...]:
    """The places of each stage's layers.

    Args:
        split_at: names of the layers that begin the second and later stages; None: as equal in layers as can be.

    >>> from torch import nn
    >>> cut(Layers.of(nn.Sequential(*[nn.ReLU() for _ in range(5)])), stages=2)
    (range(0, 2), range(2, 5))
    """
    names = [layer.name for layer in layers.layers]
    if split_at is None:
        if stages > len(names):
            raise ArgumentError(
                f"a model of {len(names)} layers can't be cut into {stages} stages: use fewer pipeline ranks or "
                f"stages per rank, or say its layers more finely."
            )
        edges = [len(names) * stage // stages for stage in range(stages + 1)]
    else:
        begins = [_begin(names, name) for name in split_at]
        edges = [0, *begins, len(names)]
        if len(begins) != stages - 1 or sorted(set(edges)) != edges:
            raise ArgumentError(
                f"`split_at` must name the first layers of stages 1 to {stages - 1}, in order, but names "
                f"{', '.join(split_at) or 'none'}; the layers are {', '.join(names)}.",
                field="split_at",
            )
    return tuple(range(begin, end) for begin, end in pairwise(edges))


def stages_per_rank_for(split_at: Sequence[str] | None, *, ranks: int) -> int | None:
    """Stages per rank of a model that is cut at these layers; None without cuts.

    >>> stages_per_rank_for(["block3", "block6", "block9"], ranks=2)
    2
    """
    return None if split_at is None else -(-(len(split_at) + 1) // ranks)


def _begin(names: list[str], wanted: str) -> int:
    found = [place for place, name in enumerate(names) if name == wanted or name.startswith(f"{wanted}.")]
    if not found:
        raise ArgumentError(
            f"`split_at` must name layers of the model, {', '.join(names)}, but '{wanted}' is none.", field="split_at"
        )
    return found[0]


def flows(layers: Layers, stages: Sequence[range]) -> dict[tuple[int, int], tuple[int, ...]]:
    """For each edge (source stage, destination stage) the places of the layers whose outputs it carries.

    Args:
        stages: the places of each stage's layers.

    >>> from torch import nn
    >>> from evenstep.pipeline.layers import Layer
    >>> layers = Layers.of([Layer("a", nn.ReLU()), Layer("b", nn.ReLU()), Layer("c", nn.Bilinear, sources=("b", "a"))])
    >>> flows(layers, [range(0, 1), range(1, 2), range(2, 3)])
    {(0, 1): (0,), (0, 2): (0,), (1, 2): (1,)}
    """
    stage_of = {place: stage for stage, places in enumerate(stages) for place in places}
    carried: dict[tuple[int, int], set[int]] = {}
    for place, stage in stage_of.items():
        for source in layers.sources(place):
            if stage_of[source] != stage:
                carried.setdefault((stage_of[source], stage), set()).add(source)
    return {edge: tuple(sorted(places)) for edge, places in sorted(carried.items())}
