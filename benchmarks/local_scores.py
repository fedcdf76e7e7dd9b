"""What ranks that step alone reach, beside ddp: two recipes with each setting of `local`, on 2 and 4 ranks, 3 seeds.

All runs are those of the recipes' own run files, shortened as `CASES` says; the settings differ in `[parallel]` alone.
A row's `median` is the score after the last update, the mean over seeds, `spread` the distance between the best seed
and the worst; `ratio` is ddp's score divided by it, and must not exceed the bound.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from evenstep.builders import build_mesh, build_parts, build_strategy, open_run  # noqa: E402 - after the path, as below
from evenstep.cli.folder import publish  # noqa: E402
from evenstep.config.sources import settings_of  # noqa: E402
from evenstep.errors import MissingExtraError  # noqa: E402
from evenstep.parallel import Group, Processes  # noqa: E402
from harness.ranks import on_ranks, one_rank  # noqa: E402
from harness.row import Row, table, write_rows  # noqa: E402

RESULTS = HERE / "results" / "local_scores.json"
RECIPES = HERE.parent / "recipes"
RANKS = (2, 4)
SEEDS = (1, 2, 3)
DDP = "ddp"
MAX_BYTES, MESSAGES = 16, 512  # of a translation; that are scored


def settings(diloco_momentum: float) -> dict[str, dict[str, Any]]:
    """What `[parallel.local]` says for each method."""
    diloco = {"outer_lr": 0.7, "outer_momentum": diloco_momentum, "nesterov": True}
    streaming = {"every_updates": 12, "fragments": 3, "overlap_updates": 2, "own_share": 0.5}
    return {
        "local SGD, every 10": {"every_updates": 10},
        "post-local SGD, 100 together, every 10": {"every_updates": 10, "synchronous_updates": 100},
        "BMUF, Nesterov, every 10": {"every_updates": 10, "outer_lr": 1.0, "outer_momentum": 0.5, "nesterov": True},
        "SlowMo, every 10": {"every_updates": 10, "outer_lr": 1.0, "outer_momentum": 0.5, "by_inner_rate": True},
        "DiLoCo, every 10": {"every_updates": 10, **diloco},
        "streaming DiLoCo, every 12 in 3, 2 late": streaming | diloco,
    }


def accuracy(trainer: Any, folder: Path) -> float:
    """The share of test images that are read rightly, in %."""
    return 100 * float(trainer.evaluate("test")["test"]["accuracy"])


def bleu(trainer: Any, folder: Path) -> float:
    """BLEU of the translations of valid messages, as the recipe's own hook makes them; 0 on all ranks but the first."""
    if not trainer.is_first_rank:
        return 0.0
    found = list(import_module("task").Translations(limit=MESSAGES, max_bytes=MAX_BYTES).translated(folder))
    mine, theirs = [ours for *_, ours in found], [one for _, one, _ in found]
    return float(import_module("sacrebleu").corpus_bleu(mine, [theirs]).score)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One recipe, shortened.

    Args:
        settings: over those of its run file.
        score: of a run that has ended, from its trainer and folder; the higher, the better.
        unit: of the score.
        lr: of ddp, and of settings without outer momentum.
        diloco_momentum: of DiLoCo's outer optimizer. The paper's 0.9 is for many shares: it takes ten to get going.
        lower_with_momentum: whether others have lr · (1 - outer_momentum) / outer_lr, so that with the outer momentum
            all go as far in the long run; else they have the same.
        bound: of ddp's score divided by that of a setting. None: as far as ddp's own seeds are apart, from its mean.
    """

    settings: Mapping[str, str]
    score: Callable[[Any, Path], float]
    unit: str
    lr: float
    diloco_momentum: float
    lower_with_momentum: bool
    bound: float | None


CASES = {
    "digits": Case(
        settings={"train.updates": "500", "evaluate.every_updates": "500"},
        score=accuracy,
        unit="%",
        lr=3e-3,
        diloco_momentum=0.9,
        lower_with_momentum=False,
        bound=1.01,
    ),
    "translation": Case(
        settings={
            "model.target": "model.py:Translator",  # ranks that step alone hold no stages
            "model.args.blocks": "1",
            "model.args.width": "64",
            "model.args.dropout": "0.0",
            "data.train.args.max_bytes": str(MAX_BYTES),
            "data.evaluations.valid.args.max_bytes": str(MAX_BYTES),
            "data.global_batch_tokens": "1024",
            "data.micro_batch_tokens": "256",
            "train.updates": "400",
            "evaluate.every_updates": "400",
            "lr_schedule.warmup_updates": "50",
            "hooks": "[]",
        },
        score=bleu,
        unit="BLEU",
        lr=5e-3,
        diloco_momentum=0.5,
        lower_with_momentum=True,
        bound=None,
    ),
}


def score_of(case: Case, recipe: str, group: Group, seed: int, local: Mapping[str, Any] | None) -> float:
    """The score of one run, the same on all ranks."""
    changed = dict(case.settings) | {"seed": str(seed), "parallel.strategy": "ddp" if local is None else "local"}
    given = local or {}
    falls = (1 - given.get("outer_momentum", 0.0)) / given.get("outer_lr", 1.0) if case.lower_with_momentum else 1.0
    changed["optimizer.lr"] = str(case.lr * falls)
    changed |= {f"parallel.local.{name}": str(value).lower() for name, value in given.items()}
    arguments = [part for name, value in changed.items() for part in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as own, open_run(RECIPES / recipe / "run.toml", settings_of(arguments)) as run:
        folder = Path(group.gather(own)[0])
        mesh = build_mesh(run.config, group)
        parts = build_parts(run, mesh)
        strategy = build_strategy(run.config, mesh.data)
        trainer = parts.trainer(folder=folder, evaluations=parts.evaluations, strategy=strategy, kept=run.plain())
        with trainer.holding_folder():
            group.first_rank_does(lambda: publish(run, folder))
            trainer.train()
        score = group.gather(case.score(trainer, folder))[0]
        group.gather(None)  # the folder is the first rank's, and goes
    return score


def measure(case: Case, recipe: str, group: Group, names: Sequence[str]) -> list[Row]:
    """These settings of one recipe on these ranks; all ranks get the same rows."""
    scores: dict[str, list[float]] = {}
    for name in names:
        began = time.perf_counter()
        local = settings(case.diloco_momentum).get(name)
        scores[name] = [score_of(case, recipe, group, seed, local) for seed in SEEDS]
        if group.rank == 0:
            shown, seconds = " ".join(f"{one:.2f}" for one in scores[name]), time.perf_counter() - began
            print(f"{recipe}, {group.ranks} ranks, {name}: {shown} {case.unit} ({seconds:.0f} s)", flush=True)
    return rows_of(case, f"{recipe}, {group.ranks} ranks", scores)


def rows_of(case: Case, name: str, scores: Mapping[str, Sequence[float]]) -> list[Row]:
    """The rows of a case, from the scores of each setting by seed.

    >>> given = {"lr": 1.0, "diloco_momentum": 0.9, "lower_with_momentum": False, "bound": None}
    >>> case = Case(settings={}, score=accuracy, unit="%", **given)
    >>> rows = rows_of(case, "digits", {DDP: [80.0, 100.0], "DiLoCo": [75.0, 75.0]})
    >>> [(row.median, row.ratio, row.spread, row.bound, row.ok) for row in rows]
    [(90.0, 1.0, 20.0, None, None), (75.0, 1.2, 0.0, 1.2857142857142858, True)]
    """
    theirs = scores[DDP]
    bound = mean(theirs) / (mean(theirs) - max(theirs) + min(theirs)) if case.bound is None else case.bound
    rows: list[Row] = []
    for setting, found in scores.items():
        ratio = mean(theirs) / mean(found) if mean(found) else math.inf
        rows.append(
            Row(
                case=name,
                contender=setting,
                median=mean(found),
                unit=case.unit,
                ratio=ratio,
                spread=max(found) - min(found),
                wall_ratio=ratio,
                bound=None if setting == DDP else bound,
            )
        )
    return rows


def main() -> list[Row]:
    """Run all cases, print the table and write results/local_scores.json.

    Raises:
        MissingExtraError: translations can't be scored; said before anything is trained.
    """
    if find_spec("sacrebleu") is None:
        raise MissingExtraError("sacrebleu", "translation")
    rows: list[Row] = []
    for name in CASES:
        for ranks in RANKS:
            rows += on_ranks(HERE / "local_scores.py", ["--case", name], ranks=ranks)
    write_rows(RESULTS, rows)
    print(f"\n{table(rows)}\n\nwritten to {RESULTS.relative_to(HERE.parent)}")
    return rows


def _measured(group: Processes, arguments: argparse.Namespace) -> list[Row]:
    return measure(CASES[arguments.case], arguments.case, group, [DDP, *settings(0.9)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure one case on one rank; see benchmarks/run.py for all.")
    parser.add_argument("--case", choices=CASES, required=True)
    one_rank(parser, _measured)
