"""What `make gpu` runs on a machine with a CUDA device, tried on one without: at toy size, and what it says there."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import Script

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks")]


import gpu as benchmark  # noqa: E402 - the folder of the benchmarks must be on the path first
import run as benchmarks  # noqa: E402


def _suite() -> Any:
    """`tests/gpu/run.py`: `run` is also the name of the benchmarks' own."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("gpu_suite", ROOT / "tests" / "gpu" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


suite = _suite()
CPU = torch.device("cpu")


def test_the_contenders_of_the_gpt_do_the_same_work() -> None:
    rows = benchmark.gpt_step(benchmark.TOY, CPU, peers=False)
    names = {row.contender for row in rows}
    assert names == {"tuned by hand", "tuned by hand, again", "evenstep", *(f"evenstep, {one}" for one in _MORE)}
    assert [row.contender for row in rows if row.bound is not None] == ["evenstep"]
    assert next(row.bound for row in rows if row.bound is not None) == pytest.approx(1 / 0.98)


_MORE = ("with an average", "each loss read")


def test_who_does_other_work_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did other work"):
        benchmark._check_same({"tuned by hand": [4.0, 3.0], "evenstep": [4.0, 3.2]})


def test_a_save_is_measured_beside_a_plain_copy() -> None:
    rows = benchmark.saves(benchmark.TOY, CPU)
    assert [row.contender for row in rows] == ["training waits", "the copy is there", "plain copy"]


def test_float8_is_measured_beside_bfloat16() -> None:
    pytest.importorskip("torchao", reason="the extra `float8` is not installed")
    rows = benchmark.in_float8(benchmark.TOY, CPU)
    assert [row.contender.removeprefix("evenstep, ") for row in rows] == [
        *("bf16-mixed", "float8-mixed tensorwise", "float8-mixed rowwise")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_without_a_device_it_is_said_and_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main() == []
    assert "no CUDA device here" in capsys.readouterr().out
    assert benchmarks.choose("gpu", benchmarks.names(ROOT / "benchmarks")) == ["gpu"]
    done = Script(ROOT / "tests" / "gpu" / "run.py", "--results", tmp_path).ended()
    assert done.code == 0, done.err
    assert "no CUDA device here: nothing was run" in done.out
    assert not list(tmp_path.iterdir())


def test_wheels_are_unpacked_and_found_before_what_is_installed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "rich-1-py3-none-any.whl", "w") as archive:
        archive.writestr("rich.py", "here = True\n")
    assert suite.unpack(tmp_path, tmp_path / "site") == ["rich-1-py3-none-any.whl"]
    assert suite.unpack(tmp_path / "nowhere", tmp_path / "site") == []
    (tmp_path / "core-1-cp39-cp39-linux_x86_64.whl").touch()  # of another Python
    assert suite.unpack(tmp_path, tmp_path / "site") == ["rich-1-py3-none-any.whl"]
    found = suite._python(suite.environment(tmp_path / "site"), "import rich, evenstep; print(rich.here)")
    assert found.stdout == "True\n", found.stderr


_TESTS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run as suite
suite.ROOT, stages, told = Path(sys.argv[2]), [(1.0, [[sys.argv[4]]])], []
env = suite.environment(Path(sys.argv[3]))
cases, code = suite.tests(env, sys.argv[5], seconds=100, marked="not gpu", stages=stages, told=told.append)
assert told[-1] == cases
print(json.dumps([cases, code]))
"""


def ended_tests(root: Path, site: Path, file: str, rows: str) -> tuple[dict[str, Any], int]:
    """What `suite.tests` gives, in a process whose pytest is forked."""
    done = Script("-c", _TESTS, ROOT / "tests" / "gpu", root, site, file, rows).ended()
    assert done.code == 0, done
    cases, code = json.loads(done.out.splitlines()[-1])
    return cases, code


def test_a_test_that_ends_its_process_takes_no_others_along(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (folder / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_hard(): os._exit(1)\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_left_out(): pass\n"
    )
    cases, code = ended_tests(tmp_path, tmp_path, "test_some.py", "")
    assert code == 1
    assert {name: one["outcome"] for name, one in cases.items()} == {
        "test_some::test_good": "passed",
        "test_some::test_hard": "died",
        "test_some::test_bad": "failure",
        "test_some::test_left_out": "skipped",
    }
    assert cases["test_some::test_left_out"]["said"] == "not here"
    assert "assert 1 == 2" in cases["test_some::test_bad"]["said"]


def test_the_suite_runs_its_tests_by_name_with_no_plugins_but_its_own(tmp_path: Path) -> None:
    cases, code = ended_tests(ROOT, tmp_path, "test_memory.py", "cast_before")
    assert code == 0
    assert {name: one["outcome"] for name, one in cases.items()} == {
        "test_memory::test_what_is_cast_before_it_is_moved_stays_pinned[cpu]": "passed"
    }


def test_all_tests_on_a_device_are_in_a_stage() -> None:
    named = [name for _, lines in suite.STAGES for line in lines for name in line]
    assert sorted(named) == sorted(one.name for one in (ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.slow  # the same call as the test before it, with what pytest itself says of a name that is nobody's
def test_a_name_that_no_test_has_is_no_success(tmp_path: Path) -> None:
    assert suite.tests(suite.environment(tmp_path), "no_such_name", seconds=100) == ({}, 5)
