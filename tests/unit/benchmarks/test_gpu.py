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

import wheels  # noqa: E402 - of tests/gpu

import gpu as benchmark  # noqa: E402 - the folder of the benchmarks must be on the path first
import run as benchmarks  # noqa: E402
from harness.row import Row  # noqa: E402


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


def test_the_gpt_has_124m_parameters_and_a_share_of_the_peak_where_one_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        model = benchmark.Gpt(benchmark.GPT_124M)
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(124e6, rel=0.01)
    assert benchmark._of_peak(1e12, CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert benchmark._of_peak(494.5e12, torch.device("cuda:0")) == pytest.approx(0.5)
    row = Row(case="gpt", contender="x", median=100.0, unit="ms/update", ratio=1.0, spread=0.0, wall_ratio=1.0)
    tokens = 10 * 32768  # of a chunk
    share = benchmark._speed(row, benchmark.GPT_124M, torch.device("cuda:0"), tokens)
    assert share is not None
    assert share.median == pytest.approx(100 * 327680 * benchmark.flops_per_token(benchmark.GPT_124M) / 989e12)


def test_a_device_with_less_memory_takes_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = benchmark.GPT_124M
    assert benchmark.fitted(whole, CPU) == whole
    monkeypatch.setattr(benchmark, "_memory_of", lambda device: 16e9)
    small = benchmark.fitted(whole, CPU)
    assert small.batch * small.num_microbatches == whole.batch * whole.num_microbatches
    assert small.batch < whole.batch


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


def test_what_is_missing_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NEEDED", ("json", "no_such_module", "nor_this_one"))
    with pytest.raises(SystemExit) as raised:
        suite.described(suite.environment(tmp_path))
    assert "lacks no_such_module, nor_this_one" in str(raised.value)
    assert "make gpu-wheels" in str(raised.value)


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


def test_rows_of_an_earlier_run_stay_on_the_same_device_only(tmp_path: Path) -> None:
    path = tmp_path / "gpu-x.json"
    what = {"device": "X", "torch": "2.11", "python": "3.12"}
    path.write_text(json.dumps({**what, "tests": {"a": 1, "b": 1}, "rows": [{"case": "gpt", "contender": "e"}]}))
    found = {**what, "tests": {"b": 2}, "rows": [{"case": "save", "contender": "e"}]}
    merged = suite.merged(path, found)
    assert merged["tests"] == {"a": 1, "b": 2}
    assert [row["case"] for row in merged["rows"]] == ["gpt", "save"]
    assert suite.merged(path, {**found, "torch": "2.12"})["tests"] == {"b": 2}
    assert suite.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_the_wheels_are_what_evenstep_needs_beside_torch_and_what_tests_it() -> None:
    wanted = wheels.requirements((ROOT / "pyproject.toml").read_text())
    names = {wheels._name(one) for one in wanted}
    assert names == {"pydantic", "rich", "pytest", "pytest-timeout", "hypothesis", "torchao"}
    asked = wheels.command("3.12", "x86_64", Path("there"), wanted)
    assert "--python-version=3.12" in asked and "--platform=manylinux_2_28_x86_64" in asked
    assert names - {"torchao"} | {"torch", "numpy"} == {name.replace("_", "-") for name in suite.NEEDED}
