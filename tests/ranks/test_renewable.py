"""Groups of real processes that are broken and formed anew."""

from pathlib import Path

import pytest
from scripts import ended, started

pytestmark = pytest.mark.slow
SCRIPT = """
import os, sys, time, torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from evenstep.parallel import Processes
from evenstep.parallel.group import Interrupted

group = Processes(torch.device("cpu"), timeout_s=30)
part = group.split([[0, 1], [2]])
mesh = group.mesh(group.ranks)
whole = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)], src_data_rank=None)
waits = [
    lambda: group.sum_floats([1.0]),
    lambda: group.begin_receive(torch.empty(2), (group.rank + 2) % 3)(),
    lambda: whole.full_tensor().sum().item(),
    lambda: dist.all_reduce(torch.ones(2)),
]
for attempt, wait in enumerate(waits):
    assert group.sum_floats([1.0]) == [3.0]
    assert part.gather(group.rank) == ([0, 1] if group.rank < 2 else [2])
    assert whole.full_tensor().sum().item() == 66
    if group.rank == 1:
        time.sleep(0.5)
        group.interrupt(f"reason {attempt}")
    began = time.monotonic()
    try:
        wait()
        raise AssertionError("nobody may get through")
    except RuntimeError as error:  # of torch itself, for what does not go through the group
        assert group.interrupted() == f"reason {attempt}", error
    except Interrupted as error:
        assert f"reason {attempt}" in str(error)
    assert time.monotonic() - began < 10, "all must wake at once"
    assert group.meet(group.rank * 10) == [0, 10, 20]
    assert group.interrupted() == ""
print("well")
group.close()
"""


BEHIND = """
import os, sys, time, torch
from evenstep.parallel import Processes
from evenstep.parallel.group import Interrupted

group = Processes(torch.device("cpu"), timeout_s=30)
part, got = group.split([[0], [1, 2]]), torch.zeros(2)
for begun in (1, 3, 5):
    assert group.begin_work() == begun
    if group.rank == 0:  # through with this work before the others are, and so in the next one
        group.begin_work()
        group.interrupt("no memory")
    else:  # longer than notices take to all ranks
        if group.rank == 1:
            group.begin_receive(got, 2)()
            assert part.gather(group.rank) == [1, 2], "nobody may take away what is under way"
        else:
            time.sleep(1)
            group.begin_send(torch.full([2], float(begun)), 1)()
            time.sleep(1)
            assert part.gather(group.rank) == [1, 2]
        assert group.interrupted() == "", "what this rank does now is not broken off"
        group.begin_work()
        began = time.monotonic()
        try:
            group.sum_floats([1.0])
            raise AssertionError("nobody may get through")
        except Interrupted as error:
            assert "no memory" in str(error)
        assert time.monotonic() - began < 10, "all must wake at once"
        assert group.rank == 2 or got.tolist() == [begun, begun]
    assert group.meet(group.rank) == [0, 1, 2]
    assert group.sum_floats([1.0]) == [3.0]
print("well")
group.close()
"""


def well(folder: Path, script: str) -> None:
    (folder / "script.py").write_text(script)
    for end in ended(started(folder / "script.py", ranks=range(3), world=3), 200):
        assert (end.code, end.out.strip()) == (0, "well"), end


def test_whoever_waits_wakes_and_all_go_on_in_new_connections(tmp_path: Path) -> None:
    well(tmp_path, SCRIPT)


def test_who_breaks_off_takes_nothing_from_those_that_are_still_at_the_work_before(tmp_path: Path) -> None:
    well(tmp_path, BEHIND)
