"""Copies of one parameter that several stages hold must be stepped alike, or they become different parameters."""

from collections.abc import Sequence

from torch import nn

from evenstep.errors import ArgumentError
from evenstep.names import named_parameters
from evenstep.pipeline import PipelineModel


def check_ties(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Raise ArgumentError where stages would step their copies of one parameter otherwise; all pipeline ranks ask.

    Args:
        groups: the names of the parameters of this rank's optimizer, by group.
    """
    if not isinstance(model, PipelineModel):
        return
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    firsts, held = model.aliases, named_parameters(model)
    tied = {*firsts, *firsts.values()} & held.keys()
    everybody = model.mesh.pipeline.gather({name: group_of.get(name) for name in sorted(tied)})
    places: dict[str, tuple[str, int | None]] = {}
    for name, number in [each for theirs in everybody for each in theirs.items()]:
        other, before = places.setdefault(firsts.get(name, name), (name, number))
        if before != number:
            raise ArgumentError(
                f"`{other}` and `{name}` are one parameter, of which two stages have a copy, but the optimizers hold "
                f"them in {_group(before)} and in {_group(number)}, so the copies would become different; give them "
                f"the same group on all ranks, by their names rather than by their places."
            )


def _group(number: int | None) -> str:
    return "no group" if number is None else f"group {number}"
