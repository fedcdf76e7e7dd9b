"""What users may rely on: the public names, and the README's snippet."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import evenstep
from evenstep.errors import TaskError

ROOT = Path(__file__).parents[2]


def test_public_names_come_from_the_modules_of_the_table() -> None:
    stub = Path(str(evenstep.__file__)).with_suffix(".pyi").read_text()
    assert evenstep.__all__ == sorted(evenstep.__all__) and "Trainer" in evenstep.__all__
    for home, names in re.findall(r"^from (\S+) import ([^(\n]+|\([^)]*\))", stub, flags=re.M):
        for name in re.findall(r"(\w+) as", names):
            assert getattr(evenstep, name) is getattr(import_module(home), name)


def test_a_star_import_overwrites_no_variable_of_a_script() -> None:
    names: dict[str, object] = {"data": 1, "train": 2, "events": 3, "Image": 4}
    exec("from evenstep import *", names)
    assert (names["data"], names["train"], names["events"], names["Image"]) == (1, 2, 3, 4)
    assert names["Trainer"] is evenstep.Trainer


def test_the_snippet_in_the_readme_trains() -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(snippets) == 1
    names: dict[str, object] = {}
    exec(compile(snippets[0], "README.md", "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer, evenstep.Trainer)
    assert trainer.progress.update == 200


def test_the_readme_shows_what_is_said_of_a_loss_that_is_a_mean() -> None:
    readme = (ROOT / "README.md").read_text()
    snippet = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0]
    habit = re.sub(
        r"( +)right = .*?(?=\n\n)",
        r"\1return torch.nn.functional.cross_entropy(output, labels)",
        snippet,
        flags=re.DOTALL,
    )
    assert habit != snippet
    with pytest.raises(TaskError) as raised:
        exec(compile(habit, "README.md", "exec"), {})
    shown = re.findall(r"```text\n(the loss of .*?)```", readme, flags=re.DOTALL)[0]
    number = r"\b\d+\.\d+"
    assert re.sub(number, "…", str(raised.value)) == re.sub(number, "…", " ".join(shown.split()))
    mean, total = map(float, re.findall(number, shown))
    assert total == pytest.approx(2 * mean, rel=1e-3)
