"""Writes docs/support-matrix.md from the claims and from the tables of the batteries.

    python tests/usage/support_matrix.py           writes the page
    python tests/usage/support_matrix.py --check   exits 1 if the page is not what would be written

The page can't say what is not so: each claim names what shows it, a test holds that those tests, proofs and faults
exist, that those of a GPU have passed on one, and a claim that nothing shows is printed as untested.
"""

import ast
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import claims_of_batteries
import claims_of_ranks
import claims_of_runs
import claims_of_systems
import claims_of_transformers
import environments
from claims import Area, Claim, Kind

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support-matrix.md"
AREAS: tuple[Area, ...] = (
    *(*claims_of_runs.AREAS, *claims_of_ranks.AREAS),
    *(*claims_of_batteries.AREAS, *claims_of_systems.AREAS),
    *claims_of_transformers.AREAS,
)
_BEGIN = """# What is supported

Made by `python tests/usage/support_matrix.py` from the tables that the tests use; what shows a claim stands beside it:
a test below `tests/`, rows of `make prove`, or faults of `make faults`. What nothing shows yet is marked *untested*.

CI runs Python 3.11 and torch 2.13 on Linux, without an accelerator; `pyproject.toml` allows torch 2.11 to 2.15. A test
of `gpu/` was last run by `make gpu` on the device that is named. What is refused is refused when the run is built, with
what was, what must be, and what to do.
"""
_END = """
## The two grades of equality

- *The same bits*: the same cut into micro-batches, on the same machine and number of threads; stopped and resumed or
  not, any number of workers, verdicts settled at any distance; with `reduction = "ordered"`, any number of ranks and
  any strategy, and for a model in stages any cut, layout and pipeline schedule (an output that more than two later
  layers take: for the same cut, or for any with `parallel.relay_skips`). On a CPU, torch's fused optimizers round the
  last elements of a tensor differently from the others, so runs whose reduction is ordered use the unfused ones there
  unless the run file says `fused`. A model whose layers are known has the same bits whole and in stages, dropout
  included; gradients of tied parameters are still summed in another order.
- *Equal up to rounding*: another cut, or `reduction = "fast"` on another number of ranks. Floating-point addition is
  not associative, so another order of summation moves the last bits; in float64 the difference after 24 updates is
  below 1e-12 (`make prove`). Dropout is keyed by micro-batch number, so another cut draws other masks: the run is then
  equally valid, not equal.
"""


def page() -> str:
    """The whole page."""
    return _BEGIN + environments.section() + "".join(_section(area) for area in AREAS) + _END


def _section(area: Area) -> str:
    rows = [f"| {_said(claim)} | {_shown(claim)} |\n" for claim in area.claims]
    return f"\n## {area.name}\n\n| what | shown by |\n|---|---|\n{''.join(rows)}"


def _said(claim: Claim) -> str:
    words = {Kind.WORKS: "", Kind.REFUSED: "**refused**: ", Kind.LIMIT: "*note*: "}
    return words[claim.kind] + claim.text.replace("|", "\\|")


def _shown(claim: Claim) -> str:
    if not claim.shown_by:
        return "*untested*"
    return ", ".join(_evidence(one) for one in claim.shown_by)


def _evidence(one: str) -> str:
    kind, _, name = one.partition(": ")
    if kind in ("prove", "faults"):
        return f"`make {kind} {'ROWS' if kind == 'prove' else 'FAULTS'}='{name.strip()}'`"
    file, _, test = one.partition("::")
    where = ", ".join([f"`{file}`", *(_devices_of(one) if file.startswith("gpu/") else [])])
    return f"{test.removeprefix('test_').replace('_', ' ')} ({where})"


def _devices_of(one: str) -> list[str]:
    """The devices on which all cases of a test have passed that were not skipped, and at least one was not."""
    file, _, test = one.partition("::")
    name, found = f"{Path(file).stem}::{test}", list[str]()
    for results in _results():
        ends = [case["outcome"] for case_name, case in results["tests"].items() if case_name.partition("[")[0] == name]
        if "passed" in ends and {*ends} <= {"passed", "skipped"}:
            found.append(results["device"].removeprefix("NVIDIA "))
    return found


@cache
def _results() -> list[dict[str, Any]]:
    """What `make gpu` has found, on each device."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("gpu-*.json"))]


def missing_evidence() -> list[str]:
    """What claims name and is not there."""
    named = [one for area in AREAS for claim in area.claims for one in claim.shown_by]
    return [one for one in named if not _exists(one)]


def _exists(one: str) -> bool:
    kind, _, name = one.partition(": ")
    if kind == "prove":
        return any(name in row for row in _names_of_proofs())
    if kind == "faults":
        return any(name in fault for fault in _names_of_faults())
    file, _, test = one.partition("::")
    return test in _names_of_tests(ROOT / "tests" / file) and (not file.startswith("gpu/") or bool(_devices_of(one)))


@cache
def _names_of_tests(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def _names_of_proofs() -> list[str]:
    sys.path[:0] = [str(ROOT / "proofs"), str(ROOT / "tests" / "faults")]
    from prove import ROWS

    return [row.name for row in ROWS]


def _names_of_faults() -> list[str]:
    sys.path[:0] = [str(ROOT / "tests" / "faults")]
    from lost import CASES

    return [case.name for case in CASES]


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    lacking = missing_evidence()
    for one in lacking:
        print(f"no such test, proof or fault, or it has not passed: {one}", file=sys.stderr)
    if arguments == ["--check"]:
        return 1 if lacking or PAGE.read_text() != page() else 0
    PAGE.write_text(page())
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
