"""What a pipeline schedule demands of the layout, and how it says that a layout is not like that.

It knows no schedule.
"""

from evenstep.errors import PlanError
from evenstep.pipeline.layout import Layout


def one_stage_per_rank(name: str, layout: Layout, *, instead: str) -> list[int]:
    """The stage of each rank; refuses a layout in which one owns several.

    Args:
        instead: a schedule for several stages per rank.

    Raises:
        PlanError: it does.
    """
    if layout.stages != layout.ranks:
        raise PlanError(
            f"the pipeline schedule {name} is for one stage per rank, but {layout.ranks} ranks own {layout.stages} "
            f"stages; cut the model into {layout.ranks} stages, or take {instead}."
        )
    return [layout.rank_of.index(rank) for rank in range(layout.ranks)]


def check_loop(name: str, layout: Layout) -> None:
    """Refuse a layout whose stages do not go round the ranks, always in the same order.

    Raises:
        PlanError: they don't.
    """
    if not all(rank == layout.rank_of[stage % layout.ranks] for stage, rank in enumerate(layout.rank_of)) or (
        layout.stages % layout.ranks
    ):
        raise PlanError(
            f"the pipeline schedule {name} needs stages that go round the ranks, such as 0 1 2 0 1 2, but their owners "
            f"are {' '.join(map(str, layout.rank_of))}."
        )


def check_v(name: str, layout: Layout) -> None:
    """Refuse a layout whose stages do not go through the ranks once and then back.

    Raises:
        PlanError: they don't.
    """
    owners = layout.rank_of
    if layout.stages != 2 * layout.ranks or owners != owners[::-1]:
        raise PlanError(
            f"the pipeline schedule {name} needs two stages per rank that go through the ranks and then back, such as "
            f"0 1 2 2 1 0, but their owners are {' '.join(map(str, owners))}."
        )
