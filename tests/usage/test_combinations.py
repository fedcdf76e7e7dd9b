"""Many things at once are what each of them is alone: whoever runs it, whatever befalls it, wherever it is gone on."""

from pathlib import Path
from typing import Any

import combinations_programs as programs
import pytest
from launched import Failed, on_ranks

SLOW = [pytest.param(range(start, start + 20), (4, 2), marks=pytest.mark.slow) for start in range(100, 200, 20)]


@pytest.mark.parametrize(("seeds", "ranks"), [(range(3), (2, 2)), *SLOW])
def test_a_combination_drawn_at_random_ends_where_one_process_does(
    seeds: range, ranks: tuple[int, int], tmp_path: Path
) -> None:
    first, second = ranks
    [alone] = on_ranks(1, programs.all_went, [*seeds], -1, str(tmp_path))
    ended = on_ranks(first, programs.all_went, [*seeds], 0, str(tmp_path))[0]
    assert not isinstance(alone, Failed), alone
    assert not isinstance(ended, Failed), ended
    left = [seed for seed in seeds if ended[seed]["stands"] < programs.UPDATES]
    again = on_ranks(second, programs.all_went, left, 1, str(tmp_path))[0]
    assert not isinstance(again, Failed), again
    for seed, found in (ended | again).items():
        _same(found, alone[seed], programs.drawn(seed))


def _same(found: dict[str, Any], alone: dict[str, Any], what: dict[str, Any]) -> None:
    assert found["stands"] == programs.UPDATES, what
    if what["fault"] == "memory":  # cut finer than in one process
        assert found["tensors"].keys() == alone["tensors"].keys(), what
        for name, values in found["tensors"].items():
            assert _flat(values) == pytest.approx(_flat(alone["tensors"][name]), rel=1e-11, abs=1e-12), (name, what)
    else:
        assert found["tensors"] == alone["tensors"], what
    assert found["metrics"].keys() == alone["metrics"].keys(), what
    for name, history in found["metrics"].items():
        assert _flat(history) == pytest.approx(_flat(alone["metrics"][name]), rel=1e-9, abs=1e-12), (name, what)


def _flat(values: Any) -> list[float]:
    return [each for one in values for each in _flat(one)] if isinstance(values, list | tuple) else [values]
