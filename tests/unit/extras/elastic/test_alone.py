"""Which ranks that step alone go on with what they hold; what they do then is in `faults/lost_alone.py`."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import evenstep
from evenstep.errors import ArgumentError, EvenstepError
from evenstep.extras.elastic import Elastic, ElasticRank
from evenstep.extras.elastic.alone import Standing, going_on
from evenstep.parallel import Ddp, Local

ABC = {"a": 0, "b": 1, "c": 2}


def one(name: str, update: int, meetings: int = 1, members: dict[str, int] = ABC, **more: Any) -> Standing:
    known = {"is_in_doubt": False, "shared_until": update, **more}
    return Standing(name=name, update=update, meetings=meetings, members=members if meetings else {}, **known)


@pytest.mark.parametrize(
    ("everybody", "goes_on"),
    [
        pytest.param([one("a", 0, 0), one("b", 0, 0)], ([0], 0), id="they begin: all take what the first has"),
        pytest.param([one("a", 7), one("c", 7)], ([0, 1], 7), id="one is lost"),
        pytest.param([one("d", 0, 0), one("b", 7), one("c", 7)], ([1, 2], 7), id="the first is lost, and comes back"),
        pytest.param([one("d", 6, 0), one("b", 7)], ([1], 7), id="it has read a checkpoint"),
        pytest.param([one("a", 7), one("b", 6, is_in_doubt=True)], ([0, 1], 7), id="one has applied, one can"),
        pytest.param([one("a", 7), one("b", 6)], ([0], 7), id="one was not there for an update"),
        pytest.param(
            [one("a", 6, is_in_doubt=True), one("b", 6, is_in_doubt=True)], ([0, 1], 6), id="nobody has applied"
        ),
        pytest.param(
            [one("a", 6, 2, {"a": 0, "c": 2}), one("b", 7), one("c", 6, 2, {"a": 0, "c": 2})],
            ([0, 2], 6),
            id="one was frozen after an update that the others have given up since",
        ),
        pytest.param(
            [one("a", 6, 3), one("b", 6, 2)], ([0, 1], 6), id="one does not know yet that all were at one place"
        ),
        pytest.param([one("a", 6, 3), one("b", 6, 1)], ([0], 6), id="one was away for a group"),
        pytest.param([one("d", 30, 0), one("b", 10, 4)], ([0], 30), id="all but a frozen one are begun anew"),
        pytest.param([one("a", -1), one("b", 7)], ([1], 7), id="one is torn"),
    ],
)
def test_those_go_on_that_were_in_the_newest_group(everybody: list[Standing], goes_on: tuple[list[int], int]) -> None:
    assert going_on(everybody) == goes_on


def test_without_a_state_of_any_update_nobody_goes_on() -> None:
    with pytest.raises(EvenstepError, match="no process that is left holds the state of an update"):
        going_on([one("a", -1), one("d", -1, 0)])


standings = st.builds(
    lambda name, update, meetings, is_in_doubt: one(name, update, meetings, is_in_doubt=is_in_doubt and update >= 0),
    st.sampled_from("abcd"),
    st.integers(-1, 4),
    st.integers(0, 3),
    st.booleans(),
)


@given(st.lists(standings, min_size=1, max_size=4, unique_by=lambda one: one.name))
def test_whoever_goes_on_is_at_one_update_or_can_apply_it(everybody: list[Standing]) -> None:
    try:
        ranks, update = going_on(everybody)
    except EvenstepError:
        return
    assert ranks
    assert any(everybody[rank].update == update for rank in ranks)
    for rank in ranks:
        held = everybody[rank]
        assert held.update == update or (held.is_in_doubt and held.update == update - 1)


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Own(torch.optim.SGD):
    """An optimizer that gives its state in a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": torch.zeros(1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_an_optimizer_whose_state_nobody_else_can_empty_is_refused() -> None:
    class Lonely:
        name, place = "0", ElasticRank(number=0, count=2, lighthouse="http://localhost:1")

    model, lighthouse = nn.Linear(1, 1), Lonely()
    with pytest.raises(ArgumentError, match="Own gives its state in a form of its own"):
        evenstep.Trainer(
            model=model,
            task=Square(),
            optimizer=Own(model.parameters(), lr=0.1),
            data=evenstep.MapData([(torch.ones(1), torch.ones(1))], global_batch_size=1),
            updates=1,
            device="cpu",
            strategy=Local(Ddp(Elastic(lighthouse, timeout_s=1))),  # pyright: ignore[reportArgumentType]
        )
