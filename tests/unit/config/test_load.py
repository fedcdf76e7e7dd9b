import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tomli_w import dumps

from evenstep.config.load import all_keys, from_arguments, from_environment
from evenstep.config.target import OpenRun, open_run
from evenstep.errors import ConfigError

Faults = Callable[..., list[str]]


def read(recipe: Path, *arguments: str, environ: dict[str, str] | None = None) -> OpenRun:
    with open_run(recipe / "run.toml", [*from_environment(environ or {}), *from_arguments(arguments)]) as run:
        return run


def test_the_command_line_is_over_the_environment_is_over_the_file(recipe: Path) -> None:
    environ = {"EVENSTEP_TRAIN__UPDATES": "20", "EVENSTEP_OPTIMIZER__LR": "0.2"}
    train = read(recipe, "--train.updates", "30", environ=environ).config
    assert (train.train.updates, train.optimizer.lr, train.data.global_batch_size) == (30, 0.2, 8)


def test_a_value_is_read_as_toml_or_else_as_text(recipe: Path) -> None:
    config = read(recipe, "--log.writers", '["csv"]', "--data.shuffle=false", "--device", "cuda:1").config
    assert (config.log.writers, config.data.shuffle, config.device) == (("csv",), False, "cuda:1")


def test_all_wrong_values_are_reported_at_once(faults: Faults) -> None:
    found = faults(
        *("--seed", "x", "--data.global_batch_size", "0", "--train.clipnorm", "5", "--data.oversized", "skp"),
        environ={"EVENSTEP_DATA__SHUFLE": "true"},
    )
    assert [fault.split()[0] for fault in found] == [
        *("`seed`", "`data.global_batch_size`", "`data.oversized`", "`data.shufle`", "`train.clipnorm`")
    ]
    assert all("(set by " in fault for fault in found)
    assert 'did you mean "skip"?' in found[2]
    assert "did you mean `train.clip_norm`?" in found[4]


def test_all_rules_and_targets_are_reported_at_once(faults: Faults) -> None:
    found = faults("--model.args.layrs", "3", "--optimizer.name", "adamw", "--train.epochs", "10")
    assert [fault.split()[0] for fault in found] == ["`train.updates`", "`model.args.layrs`", "`optimizer.name`"]


@pytest.mark.parametrize(
    ("content", "says"), [(b"name = ", "TOML"), (b'name = "a"\n# \xff\n', "utf-8"), (None, "no run file")]
)
def test_unreadable_file_is_one_fault(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError) as caught, open_run(tmp_path / "run.toml"):
        pass
    assert len(caught.value.faults) == 1


def test_the_resolved_configuration_reads_back_as_itself(recipe: Path) -> None:
    run = read(recipe, "--data.train.args.path", "a.txt", "--lr_schedule.kind", "cosine", "--hooks", "[]")
    again = recipe / "saved"
    (again / "recipe").mkdir(parents=True)
    (again / "recipe" / "parts.py").write_text((recipe / "parts.py").read_text())
    (again / "run.toml").write_text(dumps(run.resolved()))
    assert read(again).resolved() == run.resolved() == tomllib.loads(dumps(run.resolved()))
    assert read(again).config.data.train.args == {"path": str(recipe / "a.txt")}


def test_the_recipe_is_importable_only_while_the_run_is_open(recipe: Path) -> None:
    with open_run(recipe / "run.toml") as run:
        assert "parts" in sys.modules
        assert run.calls["model"].function.__name__ == "Model"
    assert "parts" not in sys.modules
    assert str(recipe) not in sys.path
    assert not (recipe / "__pycache__").exists()


KEYS = st.sampled_from([*sorted({part for key in all_keys() for part in key.split(".")}), "3", "0", "odd", ""])
VALUES = st.recursive(
    st.sampled_from([0, -1, 3, 0.5, True, "x", "cosine", "parts.py:Model", "parts.py:none", float("nan")]),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([key.split(".") for key in all_keys()]), VALUES), min_size=1, max_size=6))
@example([(["optimizer", "name"], 0), (["optimizer", "groups", "NAME", "patterns"], ["*"])])
@example([(["data", "global_batch_size"], [[]])])
def test_whatever_is_written_gives_a_run_or_faults(recipe: Path, changes: list[tuple[list[str], Any]]) -> None:
    tree: Any = tomllib.loads((recipe / "run.toml").read_text())
    for path, value in changes:
        table = tree
        for key in path[:-1]:
            table = table.setdefault(key, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table[path[-1]] = value
    (recipe / "any.toml").write_text(dumps(tree))
    try:
        with open_run(recipe / "any.toml") as run:
            assert run.calls["model"]
    except ConfigError as error:
        assert error.faults
        assert all(fault.startswith("`") and fault.endswith((".", "?")) for fault in error.faults)
