from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.config.load import from_arguments
from evenstep.config.target import open_run

Faults = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("parts.py:Modle", '`model.target` is "parts.py:Modle", but parts.py has no `Modle`; did you mean `Model`?'),
        ("part.py:Model", "has none; did you mean `parts.py`?"),
        ("parts.py:number", 'must name a class or function, but "parts.py:number" is 3.'),
        ("no_such.module:Model", "can't be imported: no_such.module raises ModuleNotFoundError: No module named"),
        ("collections:OrderedDcit", "did you mean `OrderedDict`?"),
    ],
)
def test_a_target_that_cannot_be_found_says_why(faults: Faults, target: str, says: str) -> None:
    found = faults("--model.target", target)
    assert len(found) == 1
    assert says in found[0]


def test_a_file_that_raises_when_imported_is_a_fault_with_its_line(recipe: Path, faults: Faults) -> None:
    (recipe / "raising.py").write_text("x = 1\ny = x / 0\n")
    (fault,) = faults("--model.target", "raising.py:f")
    assert "ZeroDivisionError: division by zero" in fault
    assert fault.count("raising.py:2") == 1


def test_a_file_with_the_name_of_another_module_is_a_fault(recipe: Path, faults: Faults) -> None:
    (recipe / "json.py").write_text("class Model: ...")
    (fault,) = faults("--model.target", "json.py:Model")
    assert "json.py" in fault and "rename the file" in fault


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", "2.5"),
        ("layers", '"2"'),
        ("layers", "true"),
        ("sizes", "[1, 0.5]"),
        ("label", "0.5"),
        ("shape", "{ width = 1, hight = 2 }"),
        ("shape", "{ height = 2 }"),
        ("layrs", "2"),
    ],
)
def test_arguments_are_checked_against_the_signature(faults: Faults, key: str, value: str) -> None:
    (fault,) = faults(f"--model.args.{key}", value)
    assert fault.startswith((f"`model.args.{key}` ", f"`model.args.{key}."))


def test_arguments_become_what_the_signature_says(recipe: Path) -> None:
    args = '{ layers = 2, rate = 1, sizes = [1, 2], shape = { width = 3 }, anything = "as it is" }'
    settings = from_arguments(["--model.args", args, "--data.train.args.path", "text/a.txt"])
    with open_run(recipe / "run.toml", settings) as run:
        model, data = run.calls["model"].arguments, run.calls["data.train"].arguments
    assert model["sizes"] == (1, 2)
    assert isinstance(model["rate"], float)
    assert getattr(model["shape"], "width") == 3  # noqa: B009 - its class is the recipe's
    assert model["anything"] == "as it is"
    assert data["path"] == recipe / "text" / "a.txt"


def test_a_function_that_takes_anything_gets_anything(faults: Faults) -> None:
    assert faults("--model", '{ target = "parts.py:anything", args = { one = 1, two = "2" } }') == []


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
