"""Runs recipes to their end and says what they reached beside the number to meet: `make recipes`.

A recipe whose number is a metric is trained with three seeds, by the command line, in a folder that is thrown away; the
last evaluation counts. One whose number is a comparison runs its `compare.py`, which exits 1 where it does not hold.
What came out is a row of RESULTS.md beside this file, with its day; rows of recipes that were not run stay. It exits 1
if a number is not met. The recipe `translation` has no number: its data are what the machine has.
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


def row(one: Reached) -> str:
    """The row of a recipe, in Markdown."""
    import torch

    goal = one.goal
    reached, number = one.said, goal.why
    if goal.metric is not None:
        several = ", ".join(f"{figure:.4g}" for figure in one.figures)
        reached = f"{goal.metric} {mean(one.figures):.4g} ({several})"
        number = f"{'≥' if goal.at_least else '≤'} {goal.number:g} ({goal.why})"
    met, day = "yes" if one.held else "**no**", f"{datetime.now(UTC):%Y-%m-%d}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"| {goal.recipe} | {reached} | {number} | {met} | {one.cpu_s:.0f} | {day}, {versions} |"


def page(rows: Mapping[str, str]) -> str:
    """The page, in Markdown.

    Args:
        rows: by recipe.
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
        *(rows[goal.recipe] for goal in GOALS if goal.recipe in rows),
    ]
    return "\n".join([*lines, ""])


def rows_of(path: Path) -> dict[str, str]:
    """The rows of a page, by recipe; none where there is no page."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    known = {goal.recipe for goal in GOALS}
    named = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    return {name: line for name, line in named.items() if name in known}


def main() -> int:
    """Run those whose name has the given word in it, and write the row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="", help="only those with this word in their name")
    word = parser.parse_args().recipes
    goals = [goal for goal in GOALS if word in goal.recipe]
    if not goals:
        print(f"no recipe has {word!r} in its name; there are {', '.join(goal.recipe for goal in GOALS)}.")
        return 2
    held = True
    for goal in goals:
        one = reach(goal)
        held = held and one.held
        RESULTS.write_text(page({**rows_of(RESULTS), goal.recipe: row(one)}), encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
