"""Run files: where values come from, targets and their arguments, rules between keys; all faults come at once."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tomli_w import dumps

from evenstep.config.load import OpenRun, all_keys, from_arguments, open_run
from evenstep.errors import ConfigError

Faults = Callable[..., list[str]]


def read(recipe: Path, *arguments: str) -> OpenRun:
    with open_run(recipe / "run.toml", from_arguments(arguments)) as run:
        return run


def test_the_command_line_is_over_the_file(recipe: Path) -> None:
    train = read(recipe, "--train.updates", "20", "--optimizer.lr", "0.2", "--train.updates=30").config
    assert (train.train.updates, train.optimizer.lr, train.data.global_batch_size) == (30, 0.2, 8)


def test_a_value_is_read_as_toml_or_else_as_text(recipe: Path) -> None:
    config = read(recipe, "--log.writers", '["csv"]', "--data.shuffle=false", "--device", "cuda:1").config
    assert (config.log.writers, config.data.shuffle, config.device) == (("csv",), False, "cuda:1")


def test_all_wrong_values_are_reported_at_once(faults: Faults) -> None:
    found = faults(
        *("--seed", "x", "--data.global_batch_size", "0", "--train.clipnorm", "5", "--failures.non_finite", "skp"),
        *("--data.shufle", "true"),
    )
    assert [fault.split()[0] for fault in found] == [
        *("`seed`", "`data.global_batch_size`", "`data.shufle`", "`train.clipnorm`", "`failures.non_finite`")
    ]
    assert 'did you mean "skip"?' in found[4]
    assert "did you mean `train.clip_norm`?" in found[3]


def test_all_rules_and_targets_are_reported_at_once(faults: Faults) -> None:
    found = faults("--model.args.layrs", "3", "--optimizer.name", "adamw", "--train.epochs", "10")
    assert [fault.split()[0] for fault in found] == ["`model.args.layrs`", "`train.updates`", "`optimizer.name`"]


@pytest.mark.parametrize("content", [b"name = ", b'name = "a"\n# \xff\n', None])
def test_unreadable_file_is_one_fault(tmp_path: Path, content: bytes | None) -> None:
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
    (again / "run.toml").write_text(dumps(run.tables))
    assert read(again).tables == run.tables == tomllib.loads(dumps(run.tables))
    assert read(again).config.data.train.args == {"path": recipe / "a.txt"}


def test_the_recipe_is_importable_only_while_the_run_is_open(recipe: Path) -> None:
    with open_run(recipe / "run.toml") as run:
        assert "parts" in sys.modules
        assert run.config.model.target.__name__ == "Model"  # type: ignore[union-attr]
    assert "parts" not in sys.modules
    assert str(recipe) not in sys.path
    assert not (recipe / "__pycache__").exists()


KEYS = st.sampled_from([*sorted({part for key in all_keys() for part in key.split(".")}), "3", "0", "odd", ""])
VALUES = st.recursive(
    st.sampled_from([0, -1, 3, 0.5, True, "x", "cosine", "parts.py:Model", "parts.py:none", float("nan")]),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
            assert callable(run.config.model.target)
    except ConfigError as error:
        assert error.faults
        assert all(fault.startswith("`") and fault.endswith((".", "?")) for fault in error.faults)


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("parts.py:Modle", "`Model`"),
        ("part.py:Model", "`parts.py`"),
        ("parts.py:number", ""),
        ("no_such.module:Model", ""),
        ("collections:OrderedDcit", "`OrderedDict`"),
    ],
)
def test_a_target_that_cannot_be_found_is_a_fault_with_the_closest(faults: Faults, target: str, meant: str) -> None:
    (fault,) = faults("--model.target", target)
    assert fault.startswith("`model.target`") and meant in fault


def test_a_file_with_the_name_of_another_module_is_a_fault(recipe: Path, faults: Faults) -> None:
    (recipe / "json.py").write_text("class Model: ...")
    (fault,) = faults("--model.target", "json.py:Model")
    assert "json.py" in fault and "rename the file" in fault


@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", "2.5"), ("sizes", "[1, 0.5]"), ("label", "0.5"), ("shape", "{ width = 1, hight = 2 }"), ("layrs", "2")],
)
def test_arguments_are_checked_against_the_signature(faults: Faults, key: str, value: str) -> None:
    (fault,) = faults(f"--model.args.{key}", value)
    assert fault.startswith((f"`model.args.{key}` ", f"`model.args.{key}."))


def test_arguments_become_what_the_signature_says(recipe: Path) -> None:
    args = '{ layers = 2, rate = 1, sizes = [1, 2], shape = { width = 3 }, anything = "as it is" }'
    settings = from_arguments(["--model.args", args, "--data.train.args.path", "text/a.txt"])
    with open_run(recipe / "run.toml", settings) as run:
        model, data = run.config.model.args, run.config.data.train.args
    assert model["sizes"] == (1, 2)
    assert isinstance(model["rate"], float)
    assert getattr(model["shape"], "width") == 3  # noqa: B009 - its class is the recipe's
    assert model["anything"] == "as it is"
    assert data["path"] == recipe / "text" / "a.txt"


def test_an_optimizer_is_a_class_of_torch_or_a_target_with_lr(faults: Faults) -> None:
    assert faults("--optimizer.args.momentum", "0.9") == []
    own = '{ target = "parts.py:optimizer", lr = 0.1, args = { decay = 0.1 } }'
    assert faults("--optimizer", own) == []
    for wrong in (
        ("--optimizer.args.momentun", "0.9"),
        ("--optimizer.args.lr", "0.9"),
        ("--optimizer", own.replace("parts.py:optimizer", "parts.py:without_lr")),
    ):
        assert faults(*wrong)[0].startswith("`optimizer"), wrong


BROKEN = [
    (["--train.epochs", "1"], "train.updates"),
    (["--data.global_batch_tokens", "10"], "data.global_batch_size"),
    (["--task", "none"], "task"),
    (["--parallel.shard_ranks", "2"], "parallel.shard_ranks"),
    (["--train.precision", '{kind = "bf16-mixed", initial = 8}'], "train.precision.initial"),
    (["--evaluation.every_updates", "8"], "evaluation"),
    (["--reset", "optimizer"], "reset"),
    (["--launch.lost_rank", "continue", "--parallel.strategy", "fsdp", "--launch.ranks", "2"], "launch.lost_rank"),
    (["--lr_schedule.kind", "listed"], "lr_schedule.factors"),
]


@pytest.mark.parametrize(("arguments", "key"), BROKEN, ids=[key for _, key in BROKEN])
def test_broken_rule_is_one_fault(faults: Faults, arguments: list[str], key: str) -> None:
    found = faults(*arguments)
    assert [fault.startswith(f"`{key}`") for fault in found] == [True], found


def test_allowed_combinations_have_no_faults(faults: Faults) -> None:
    assert faults("--train.precision", '{kind = "16-mixed", initial = 8}') == []
    assert faults("--data.reading.skip_failing", "true", "--failures.max_skipped_samples", "8") == []


HEAD = """
name = "several"
model = { target = "parts.py:Model", args = { layers = 2 } }
train = { updates = 10 }
optimizer = { name = "SGD", lr = 0.1 }
"""
TASKS = """
[tasks.class]
target = "parts.py:Task"
[tasks.class.data]
global_batch_size = 8
train = { target = "parts.py:samples" }
[tasks.box]
target = "parts.py:Task"
[tasks.box.data]
global_batch_size = 4
train = { target = "parts.py:samples" }
[tasks.box.data.evaluations.valid]
target = "parts.py:samples"
"""


@pytest.fixture
def several(recipe: Path) -> Callable[[str], list[str]]:
    """The faults of a run file."""

    def read(text: str) -> list[str]:
        (recipe / "run.toml").write_text(text)
        try:
            with open_run(recipe / "run.toml"):
                return []
        except ConfigError as error:
            return error.faults

    return read


def test_tables_of_several_tasks_are_read_with_their_calls(several: Callable[[str], list[str]], recipe: Path) -> None:
    assert several(HEAD + TASKS) == []
    with open_run(recipe / "run.toml") as run:
        assert [name for name, task in run.config.tasks.items() if callable(task.target)] == ["class", "box"]
        assert "task" not in run.tables


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("global_batch_size = 4", "", "tasks.box.data.global_batch_size"),
        ('"parts.py:Task"\n[tasks.box.data]', '"parts.py:Tusk"\n[tasks.box.data]', "tasks.box.target"),
        ("[tasks.box]", "[tasks.box]\ncoeficient = 1.0", "tasks.box.coeficient"),
    ],
)
def test_fault_of_one_task_has_its_key(several: Callable[[str], list[str]], old: str, new: str, key: str) -> None:
    found = several(HEAD + TASKS.replace(old, new))
    assert any(fault.startswith(f"`{key}`") for fault in found), found
