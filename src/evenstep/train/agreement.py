"""Comparisons of ranks before they train: all must share one model in the same way, and describe the same run."""

from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn

from evenstep.errors import ArgumentError, ReplicaError
from evenstep.internals import unwrapped
from evenstep.parallel import Group, Strategy
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.ties import check_frozen
from evenstep.tensors import named_parameters


def check_shared(model: nn.Module, strategy: Strategy) -> None:
    """Raise ReplicaError unless all ranks are about to share the same model in the same way; all call it together.

    Nothing of the model has been sent yet: tensors of other sizes can end a process within the collective.
    """
    whole = unwrapped(model)
    tensors = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    described = {
        **{name or "itself": type(module).__name__ for name, module in whole.named_modules()},
        **{name: f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for name, one in tensors.items()},
    }
    run = {"strategy": type(strategy).__name__, **strategy.settings, "model": described}
    check_same_on_all_ranks(strategy.group, run)


def check_ties(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Compare copies of parameters in stages, which would be stepped differently.

    Args:
        groups: parameters of this rank's optimizer by group.
    """
    if not isinstance(model, PipelineModel):
        return
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    firsts, held = model.aliases, named_parameters(model)
    tied = {*firsts, *firsts.values()} & held.keys()
    mine = [(name, group_of.get(name), held[name].requires_grad) for name in sorted(tied)]
    places: dict[str, int | None] = {}
    trains: dict[str, dict[str, bool]] = {}
    for name, number, is_trained in [each for theirs in model.mesh.pipeline.gather(mine) for each in theirs]:
        first = firsts.get(name, name)
        trains.setdefault(first, {})[name] = is_trained
        if places.setdefault(first, number) != number:
            raise ArgumentError(
                f"`{name}` and `{first}` are copies of one parameter, but in different groups of the optimizers: give "
                f"them the same group on all ranks.",
                field=name,
            )
    for copies in trains.values():
        check_frozen(copies)


def check_same_on_all_ranks(group: Group, described: Mapping[str, object]) -> None:
    """Raise ReplicaError, with the rank and the first difference, unless all ranks describe the same run."""
    everybody = group.gather(described)
    for rank, theirs in enumerate(everybody):
        found = _difference("", theirs, everybody[0])
        if found is not None:
            name, value, first = found
            raise ReplicaError(
                f"all ranks must train the same run, but `{name}` is {value!s:.200} on rank {rank} and {first!s:.200} "
                f"on rank 0; give all ranks the same files, versions and settings.",
                field=name,
            )


def _difference(name: str, one: object, other: object) -> tuple[str, object, object] | None:
    if one == other:
        return None
    if not isinstance(one, dict) or not isinstance(other, dict):
        return name, one, other
    mine, theirs = cast("dict[str, object]", one), cast("dict[str, object]", other)
    for key in {**theirs, **mine}:
        found = _difference(f"{name}.{key}" if name else key, mine.get(key, "absent"), theirs.get(key, "absent"))
        if found is not None:
            return found
    return None
