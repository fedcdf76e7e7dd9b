"""Runs recipes to their end and says what they reached beside the number to meet, and proves each: `make recipes`.

A recipe whose number is a metric is trained with three seeds, by the command line, in a folder that is thrown away; the
last evaluation counts. One whose number is a comparison runs its `compare.py`, which exits 1 where it does not hold.
`evenstep prove` then gives its certificate, in minutes. What came out are rows of RESULTS.md beside this file, with
their day; rows of recipes that were not run stay. It exits 1 if a number is not met, or a row of a certificate fails.
The recipe `translation` has no number, since its data are what the machine has, but a certificate.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, final

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
SEEDS = (1, 2, 3)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a recipe must reach.

    Args:
        recipe: its folder.
        metric: of its last evaluation; None where `compare.py` judges.
        number: to be met by the mean over seeds.
        at_least: whether more is better.
        why: where the number comes from.
        run_file: in the recipe's folder.
        before: a script there and its arguments, to be run first.
        settings: of the command line, beside the seed; where `compare.py` judges its arguments.
    """

    recipe: str
    metric: str | None = None
    number: float = 0.0
    at_least: bool = True
    why: str
    run_file: str = "run.toml"
    before: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


GOALS = (
    Goal(recipe="digits", metric="test/accuracy", number=0.98, why="a net half as wide without shifts: 97.4 to 98.0 %"),
    Goal(recipe="digits_multitask", why="three tasks in one net, each as good as alone within stated margins"),
    Goal(
        recipe="gpt_bytes",
        metric="valid/bits_per_byte",
        number=2.45,
        at_least=False,
        why="2.30 with Python 3.11's library; a bigram model has 3.60",
    ),
    Goal(
        recipe="gpt2_124m",
        metric="valid/loss",
        number=1.8,
        at_least=False,
        why="at toy size, as measured; its own number, 3.28 on FineWeb, needs GPUs",
        run_file="toy.toml",
        before=("tokens.py", "toy"),
    ),
    Goal(recipe="sft", why="the loss curve of transformers' Trainer within 1e-6, under every cut"),
    Goal(recipe="shakespeare", why="nanoGPT's settings in a plain loop: the same loss in no more processor time"),
    Goal(recipe="vit", metric="test/accuracy", number=0.94, why="as measured; its speed is a row of `make bench`"),
)


NUMBERED = tuple(goal.recipe for goal in GOALS)
PROVED = (*NUMBERED, "translation")
CERTIFICATES = "## Certificates"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What came out.

    Args:
        goal: what was to be reached.
        figures: of each seed; empty where `compare.py` judges.
        held: whether the number is met.
        said: the last lines of `compare.py`.
        cpu_s: processor time of all seeds.
    """

    goal: Goal
    figures: tuple[float, ...]
    held: bool
    said: str
    cpu_s: float


def reach(goal: Goal) -> Reached:
    """Run one recipe to its end, with all seeds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    folder = HERE / goal.recipe
    if goal.before:
        script, *arguments = goal.before
        subprocess.run([sys.executable, str(folder / script), *arguments], check=True)
    if goal.metric is None:
        done = subprocess.run(
            [sys.executable, str(folder / "compare.py"), *goal.settings], capture_output=True, text=True, check=False
        )
        print(done.stdout + done.stderr, flush=True)
        figures: tuple[float, ...] = ()
        held, said = done.returncode == 0, "; ".join(done.stdout.strip().splitlines()[-2:])
    else:
        figures = tuple(trained(goal, seed) for seed in SEEDS)
        held = mean(figures) >= goal.number if goal.at_least else mean(figures) <= goal.number
        said = ""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Reached(goal=goal, figures=figures, held=held, said=said, cpu_s=spent)


def trained(goal: Goal, seed: int) -> float:
    """The metric of the last evaluation after training with one seed."""
    assert goal.metric is not None
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "evenstep", "train", str(HERE / goal.recipe / goal.run_file)]
        settings = ["--seed", str(seed), "--runs", runs, "--name", goal.recipe, *goal.settings]
        print(f"{goal.recipe}, seed {seed} …", flush=True)
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
        lines = Path(runs, goal.recipe, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    figure = float([record[goal.metric] for record in records if goal.metric in record][-1])
    print(f"{goal.recipe}, seed {seed}: {goal.metric} {figure:.4f}", flush=True)
    return figure


def proved(recipe: str) -> tuple[bool, str]:
    """Whether no row of a recipe's certificate fails, and its row in Markdown."""
    run_file = next((goal.run_file for goal in GOALS if goal.recipe == recipe), "run.toml")
    lacks = recipe == "translation" and find_spec("sacrebleu") is None
    print(f"{recipe}, certificate …", flush=True)
    with tempfile.TemporaryDirectory() as name:
        proof = Path(name, "proof.json")
        command = [sys.executable, "-m", "evenstep", "prove", str(HERE / recipe / run_file), "--json", str(proof)]
        subprocess.run([*command, *(["--hooks", "[]"] if lacks else [])], check=False)
        if not proof.is_file():  # it can't be built, and has said why
            return False, certificate(recipe, {"rows": [], "updates": 0})
        made = json.loads(proof.read_text(encoding="utf-8"))
    return made["holds"], certificate(recipe, made)


def certificate(recipe: str, made: Mapping[str, Any]) -> str:
    """The row of a certificate, in Markdown.

    Args:
        made: what `evenstep prove --json` has written.
    """
    rows: list[dict[str, Any]] = made["rows"]
    holds = [row["row"] for row in rows if row["holds"]]
    fails = [row["row"] for row in rows if row["holds"] is False]
    without = [f"{row['row']}: {row['note'].partition(': ')[0].rstrip('.')}" for row in rows if row["holds"] is None]
    failed = f"**{', '.join(fails)}**" if fails else "none" if rows else "**it can't be built**"
    seconds = sum(row["seconds"] for row in rows)
    cells = (
        recipe,
        f"{len(holds)}: {', '.join(holds)}",
        failed,
        "; ".join(without) or "none",
        f"{seconds:.0f}",
        _made(),
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _made() -> str:
    """The day, and the versions."""
    import torch

    return f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, torch {torch.__version__}"


def row(one: Reached) -> str:
    """The row of a recipe, in Markdown."""
    goal = one.goal
    reached, number = one.said, goal.why
    if goal.metric is not None:
        several = ", ".join(f"{figure:.4g}" for figure in one.figures)
        reached = f"{goal.metric} {mean(one.figures):.4g} ({several})"
        number = f"{'≥' if goal.at_least else '≤'} {goal.number:g} ({goal.why})"
    met = "yes" if one.held else "**no**"
    return f"| {goal.recipe} | {reached} | {number} | {met} | {one.cpu_s:.0f} | {_made()} |"


def page(rows: Mapping[str, str], certificates: Mapping[str, str]) -> str:
    """The page, in Markdown.

    Args:
        rows: by recipe.
        certificates: by recipe.
    """
    seeds = ", ".join(map(str, SEEDS))
    lines = [
        "# What the recipes reach",
        "",
        "Made by `make recipes`: each recipe run to its end on a CPU with one thread; where a metric is the number,",
        f"with seeds {seeds}.",
        "",
        "| recipe | reached | number to meet | met | processor seconds, all seeds | made |",
        "|---|---|---|---|---|---|",
        *(rows[recipe] for recipe in NUMBERED if recipe in rows),
        "",
        CERTIFICATES,
        "",
        "[`evenstep prove`](../docs/prove.md) of each: the run shrunk to few updates, cut, shared, stopped and killed",
        "in other ways. A row that a run can't have does not count. `gpt2_124m` is proved at toy size, since its data",
        "are not here; `translation` without the hook that needs its extra, where that is not installed.",
        "",
        "| recipe | rows that hold | rows that fail | not for this run | seconds | made |",
        "|---|---|---|---|---|---|",
        *(certificates[recipe] for recipe in PROVED if recipe in certificates),
    ]
    return "\n".join([*lines, ""])


def rows_of(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The rows of a page and its certificates, by recipe; none where there is no page."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    reached, _, certificates = text.partition(CERTIFICATES)
    return _rows(reached), _rows(certificates)


def _rows(text: str) -> dict[str, str]:
    named = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    return {name: line for name, line in named.items() if name in PROVED}


def main() -> int:
    """Run and prove those whose name has the given word in it, and write the rows of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="", help="only those with this word in their name")
    parser.add_argument("--prove", action="store_true", help="only their certificates")
    arguments = parser.parse_args()
    word = arguments.recipes
    chosen = [recipe for recipe in PROVED if word in recipe]
    if not chosen:
        print(f"no recipe has {word!r} in its name; there are {', '.join(PROVED)}.")
        return 2
    held = True
    for recipe in chosen:
        rows, certificates = rows_of(RESULTS)
        for goal in (goal for goal in GOALS if goal.recipe == recipe and not arguments.prove):
            one = reach(goal)
            held = held and one.held
            rows[recipe] = row(one)
        holds, certificates[recipe] = proved(recipe)
        held = held and holds
        RESULTS.write_text(page(rows, certificates), encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
