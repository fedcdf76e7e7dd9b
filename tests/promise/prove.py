"""Proves the promise: one row per way of cutting, stopping or failing the same run, each with a bound.

    make prove                 all rows
    make prove ROWS=killed     the rows whose name contains "killed"

Prints a table, writes build/proof.json (a list of {row, measure, value, bound, ok}) and exits 1 if any row fails.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "usage"))

import rows
import walk
from rows import Row


def prove(table: list[Row]) -> list[dict[str, object]]:
    """Run the rows, print one line each, and give them as they go into proof.json."""
    width = max((len(row.name) for row in table), default=3)
    print(f"{'row':<{width}}  {'measure':<44}  {'value':<18}  {'bound':<18}  ok      s")
    results: list[dict[str, object]] = []
    for row in table:
        began = time.perf_counter()
        try:
            value, bound = row.run()
        except Exception as error:  # noqa: BLE001 - a row that raises has failed; the others still count
            traceback.print_exc()
            value, bound = f"{type(error).__name__}: {error}", "no error"
        ok = value == bound if isinstance(value, str) or isinstance(bound, str) else value <= bound
        shown = [f"{x[:16]}" if isinstance(x, str) else f"{x:.3g}" for x in (value, bound)]
        seconds = time.perf_counter() - began
        print(
            f"{row.name:<{width}}  {row.measure:<44}  {shown[0]:<18}  {shown[1]:<18}  "
            f"{'yes' if ok else 'NO':<3}  {seconds:5.1f}",
            flush=True,
        )
        results.append({"row": row.name, "measure": row.measure, "value": value, "bound": bound, "ok": ok})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Prove that one update is one update.")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("build/proof.json"))
    arguments = parser.parse_args()
    table = [*rows.rows(), *walk.ROWS]
    wanted = [row for row in table if arguments.rows in row.name]
    if not wanted:
        print(f"no row contains '{arguments.rows}'; there are: {', '.join(row.name for row in table)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    results = prove(wanted)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    failed = [str(result["row"]) for result in results if not result["ok"]]
    print(f"{len(results) - len(failed)} of {len(results)} rows hold; written to {arguments.out}")
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
