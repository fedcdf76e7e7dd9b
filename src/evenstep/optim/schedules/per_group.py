"""A schedule of its own for some of the optimizer's parameter groups."""

from collections.abc import Collection, Mapping
from typing import cast, final

from evenstep.arguments import require_object, require_table
from evenstep.errors import ArgumentError
from evenstep.optim.schedules.constant import Constant
from evenstep.optim.schedules.schedule import LrSchedule, Need

_CONSTANT = Constant()


@final
class PerGroup(LrSchedule):
    """Each named group follows its own schedule, all others another.

    Args:
        groups: schedules by the `name` of the optimizer's groups, or by their number, 0 or "0". One for `head` is
            for `head/no_decay` as well, unless that is named itself.
        others: of the groups that are not named.

    Raises:
        ArgumentError: no group, or no schedule.

    >>> from evenstep.optim.schedules import Cosine
    >>> schedule = PerGroup({"head": Cosine()})
    >>> schedule.of_group("head"), schedule.of_group("1")
    (Cosine(warmup_updates=0, end_factor=0.1), Constant(warmup_updates=0))
    """

    def __init__(self, groups: Mapping[str | int, LrSchedule], others: LrSchedule = _CONSTANT) -> None:
        if isinstance(cast("object", groups), Mapping):
            groups = {str(name) if isinstance(name, int) else name: one for name, one in groups.items()}
        self.groups = dict(require_table("groups", groups, "`PerGroup({'head': Cosine()})`"))
        self.others = others
        if not self.groups:
            raise ArgumentError("`groups` must name at least one group, but is empty; give `others` itself instead.")
        for name, schedule in {**self.groups, "": others}.items():
            argument = f"groups[{name!r}]" if name else "others"
            require_object(argument, schedule, LrSchedule, "`Cosine()`")
            if "groups" in schedule.needs:
                raise ArgumentError(f"`{argument}` is a PerGroup itself; name all groups in one.")

    @property
    def needs(self) -> Collection[Need]:
        return ("groups", *{need for one in (*self.groups.values(), self.others) for need in one.needs})

    def __call__(self, update: int, updates: int | None) -> float:
        return self.others(update, updates)

    def check(self, updates: int | None) -> None:
        for schedule in (*self.groups.values(), self.others):
            schedule.check(updates)

    def of_group(self, name: str) -> LrSchedule:
        whole = name.partition("/")[0]  # of a group that layer-wise decay, say, has divided
        return self.groups.get(name) or self.groups.get(whole) or self.others
