"""What users may rely on: public names, the README's snippet, words of other trainers, links, keys in messages."""

import ast
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import links
import pytest

import evenstep
from evenstep.config.load import all_keys
from evenstep.errors import ArgumentError
from evenstep.usual_words import ARGUMENTS, KEYS
from refused import refused

ROOT = Path(__file__).parents[2]


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


def test_each_word_has_a_key_that_exists() -> None:
    known = {*all_keys(), "resume"}
    assert {key for key in KEYS.values() if key not in known and not key.startswith("optimizer.args.")} == set()


def test_each_word_has_an_argument_that_exists() -> None:
    known = {*inspect.signature(evenstep.Trainer).parameters, "trainer"}
    assert {re.split(r"\W", text)[0] for text in ARGUMENTS.values()} <= known


def test_trainer_refuses_unknown_arguments() -> None:
    trainer: Any = evenstep.Trainer
    with refused(ArgumentError, "max_epochs"):
        trainer(model=None, task=None, optimizer=None, data=None, max_epochs=3)


def test_package_names_our_class_for_a_usual_one() -> None:
    with pytest.raises(AttributeError, match=r"evenstep\.EarlyStop"):
        _ = evenstep.EarlyStopping  # pyright: ignore[reportAttributeAccessIssue]


def test_every_local_link_of_the_pages_leads_somewhere() -> None:
    assert links.broken(ROOT) == []


def test_the_page_on_installing_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page] == []


SOURCE = Path(__file__).parents[2] / "src" / "evenstep"


def test_what_messages_say_to_write_in_a_run_file_are_keys_of_run_files() -> None:
    said = {
        key
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for key in re.findall(r"in a run\s+file,? `([a-z_]+\.[a-z_.]+)", node.value)
    }
    assert said and said <= set(all_keys())


def test_a_trainer_takes_few_arguments() -> None:
    assert len({*inspect.signature(evenstep.Trainer).parameters} - {"unknown"}) <= 20
