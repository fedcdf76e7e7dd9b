"""`evenstep prove`: a table, a file of JSON and an exit code, from a run file; what fails is named in all three."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
QUICK = ("--rows", "loss,cuts 4,optimizer", "--updates", "2")


def test_a_sound_run_holds_in_every_row_and_nothing_is_written(evenstep: Run, recipe: Path) -> None:
    before = {path for path in recipe.rglob("*") if "__pycache__" not in path.parts}
    done = evenstep("prove", "run.toml", "--json", "out/proof.json", *QUICK)
    assert done.code == 0, done.out + done.err
    made = json.loads((recipe / "out/proof.json").read_text())
    assert made["holds"] and made["run"] == "run.toml" and made["updates"] == 2
    rows = {row["row"]: row for row in made["rows"]}
    assert [*rows] == ["loss", "cuts 4", "optimizer"]
    assert all(row["holds"] for row in rows.values()), rows
    assert 0 <= rows["cuts 4"]["value"] <= rows["cuts 4"]["bound"] < 1e-10
    lines = done.out.splitlines()
    assert lines[0].split() == ["row", "difference", "bound", "s", "compared"]
    assert lines[-1].startswith("3 rows hold")
    after = {path for path in recipe.rglob("*") if "__pycache__" not in path.parts}
    assert after - before == {recipe / "out", recipe / "out/proof.json"}


def test_what_depends_on_the_cut_is_named_and_gives_exit_code_1(evenstep: Run, recipe: Path) -> None:
    (recipe / "normed.py").write_text(
        "from torch import nn\n"
        "class Normed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.norm(self.first(x)))\n"
    )
    arguments = ("--model.target", "normed.py:Normed", "--rows", "cuts 4", "--json", "proof.json")
    done = evenstep("prove", "run.toml", *arguments, "--updates", "1")
    assert done.code == 1, done.out + done.err
    said = json.loads((recipe / "proof.json").read_text())["rows"][0]
    assert said["holds"] is False and said["value"] > said["bound"]
    assert "module `norm`" in said["causes"][0]
    assert "FAILS" in done.out and "module `norm`" in " ".join(done.out.split())
