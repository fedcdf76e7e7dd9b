"""What a pass said before it broke off is not said again by the one that takes its place."""

from typing import Any

import torch
from torch import Tensor

from evenstep.parallel import Group
from evenstep.parallel.spoken import Spoken


class Part:
    """Takes collectives as an `FSDPModule` does, and notes what its peers hear."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.all_reduces: list[bool] = []

    def set_custom_all_gather(self, collective: Any) -> None:
        self.gather = collective

    def set_custom_reduce_scatter(self, collective: Any) -> None:
        self.reduce = collective

    def set_requires_all_reduce(self, requires: bool, *, recurse: bool) -> None:
        assert not recurse
        self.all_reduces.append(requires)


class Own:
    """FSDP2's own collectives."""

    def __init__(self, part: Part) -> None:
        self._all_gather_process_group = None
        self._all_gather_comm = self._of(part, "gather")
        self._reduce_scatter_comm = self._of(part, "reduce")

    def _of(self, part: Part, what: str) -> Any:
        def say(output: Tensor, own: Tensor) -> None:
            part.heard.append(what)

        say.allocate = torch.empty  # type: ignore[attr-defined]
        return say


def listened() -> tuple[Spoken, Part]:
    spoken, part = Spoken(Group()), Part()
    spoken.listen(part, Own(part))
    spoken.start()
    return spoken, part


def test_a_pass_that_takes_the_place_of_another_says_the_rest() -> None:
    spoken, part = listened()
    spoken.begin()
    part.gather(torch.zeros(4), torch.ones(2))
    spoken.go_on()
    spoken.begin()
    output = torch.zeros(4)
    part.gather(output, torch.ones(2))
    part.reduce(torch.zeros(1), torch.ones(2))
    assert part.heard == ["gather", "reduce"]
    assert torch.equal(output, torch.ones(4)), "as if all ranks held the same"
    assert spoken.passes == 1


def test_one_that_breaks_off_earlier_than_the_first_does_not_say_it_again_either() -> None:
    spoken, part = listened()
    for gathers in (2, 1, 3):
        spoken.begin()
        for _ in range(gathers):
            part.gather(torch.zeros(2), torch.ones(2))
        spoken.go_on()
    assert part.heard == ["gather"] * 3


def test_the_next_pass_says_all() -> None:
    spoken, part = listened()
    spoken.begin()
    part.gather(torch.zeros(2), torch.ones(2))
    spoken.go_on()
    spoken.begin()
    spoken.begin()
    part.gather(torch.zeros(2), torch.ones(2))
    assert part.heard == ["gather"] * 2
    assert spoken.passes == 2


def test_what_was_reduced_is_not_summed_over_copies_once_more() -> None:
    spoken, part = listened()
    spoken.begin()
    part.reduce(torch.zeros(1), torch.ones(2))
    spoken.go_on()
    spoken.begin()
    assert part.all_reduces == [False]
    spoken.begin()
    assert part.all_reduces == [False, True]


def test_before_the_first_pass_there_is_nothing_to_go_on_with() -> None:
    spoken, _ = listened()
    spoken.go_on()
    assert not spoken.broken
