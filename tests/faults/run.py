"""Runs the battery: one line per fault with its outcome and seconds; build/faults.json; exit 1 on any miss.

make faults                 all
make faults FAULTS=memory   those whose name contains "memory"
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "usage"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from battery import Case, limited
from lost import CASES


def outcome(case: Case) -> tuple[bool, str, float]:
    """Whether it came out as it must, what is to be said, and its seconds."""
    began = time.monotonic()
    try:
        seconds = limited(case.check, 600 if case.slow else 120)
    except Exception as error:  # noqa: BLE001 - a miss is a line of the report, not its end
        return False, f"{type(error).__name__}: {error}".splitlines()[0], time.monotonic() - began
    return True, "as it must", seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject every fault, and see that each comes out as it must.")
    parser.add_argument("--faults", default="", help="only faults whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in CASES if arguments.faults in case.name]
    if not cases:
        print(f"no fault's name contains '{arguments.faults}'", file=sys.stderr)
        return 2
    results: list[dict[str, object]] = []
    for case in cases:
        ok, said, seconds = outcome(case)
        print(f"{'ok  ' if ok else 'MISS'}  {seconds:6.1f} s  {case.name}{'' if ok else f': {said}'}", flush=True)
        results.append({"fault": case.name, "ok": ok, "outcome": said, "seconds": round(seconds, 2)})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    missed = sum(not result["ok"] for result in results)
    print(f"{len(results) - missed} of {len(results)} faults come out as they must; written to {arguments.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
