"""Every block of README.md and of the pages in docs/ is run, or checked by what reads its language.

Python is run from the top of a page to its end, with the names of `given/`. A block of TOML is a run file, or a part of
one, and `evenstep check` builds and tries the run. Of commands the real parsers take the arguments, and the settings
are looked up in the configuration; commands that take a moment are run.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pages import GIVEN, LANGUAGES, PAGES, ROOT, Block, all_blocks, blocks, names_for, outside_of_blocks, run, run_file
from typer.core import TyperGroup
from typer.main import get_command

from evenstep.cli import main
from evenstep.cli.app import app
from evenstep.config.load import from_arguments, open_run

COMMAND: dict[str, Any] = cast(TyperGroup, get_command(app)).commands
# Pages whose Python another test runs, and looks at what comes of it.
ELSEWHERE = {
    "README": "tests/unit/test_public.py",
    "from-a-loop": "tests/usage/test_coming_from.py",
    "from-hf-trainer": "tests/usage/test_coming_from.py",
    "from-lightning": "tests/usage/test_coming_from.py",
    "transformers": "tests/unit/hf/test_saving.py",
}
# What a page's block that has these words needs beside it.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("checkpoints", "mirror = "): {"checkpoint": {"mirror": "memory://runs"}},  # s3:// needs the extra `s3`
    # the device of this machine multiplies nothing in float8, and compiling takes long
    ("precision", "float8-mixed"): {"train": {"compile": "off", "precision": {"emulate": True}}},
    ("transformers", "[model]"): {
        "data": {
            "collate": "data.py:rows",
            "train": {"target": "data.py:documents"},
            "evaluations": {"valid": {"target": "data.py:documents"}},
        },
    },
}
# Blocks of TOML whose runs are built by a slow test only: they start ranks, or load large libraries.
SLOWLY_BUILT = {
    ("failures", "launch"): "four ranks",
    ("hosts", "launch"): "eight ranks",
    ("ranks", "launch"): "four ranks",
    ("optimizers", "target"): "torchao compiles a kernel for each shape",
    ("precision", "float8"): "loads torchao",
    ("transformers", "model"): "loads transformers",
}


def is_slow(block: Block) -> bool:
    return any(block.page == page and re.search(rf"\b{key}\b", block.text) for page, key in SLOWLY_BUILT)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The tiny recipe, which is the working directory as well."""
    shutil.copytree(GIVEN / "recipe", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "runs" / "first").mkdir(parents=True)
    return tmp_path


def test_every_block_has_a_language_and_none_is_only_indented() -> None:
    assert [str(block) for block in all_blocks() if block.language not in LANGUAGES] == []
    indented = {page: lines for page in PAGES if (lines := re.findall(r"\n\n    .*", outside_of_blocks(page)))}
    assert indented == {}


# -- Python


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and blocks(page, "python")])
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_for(page)
    for name, value in names.get("environ", {}).items():
        monkeypatch.setenv(name, value)
    for block in blocks(page, "python"):
        run(block, names)
    if "use" in names:  # what was only defined
        names["use"]()


@pytest.mark.parametrize("page", ELSEWHERE)
def test_what_is_run_elsewhere_is_run_there(page: str) -> None:
    assert blocks(page, "python")
    text = (ROOT / ELSEWHERE[page]).read_text()
    assert f'"{page}"' in text or f"{page}.md" in text


def test_every_file_of_given_belongs_to_a_page_that_has_python() -> None:
    assert {path.stem for path in GIVEN.glob("*.py")} - {"names"} <= {
        page for page in PAGES if page not in ELSEWHERE and blocks(page, "python")
    }


# -- TOML


def beside(block: Block) -> dict[str, Any]:
    needed = (more for (page, table), more in BESIDE.items() if page == block.page and table in block.text)
    return next(needed, {})


def check(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "init_from" in block.text:  # a run to begin with
        (folder / "runs" / "first").rmdir()
        main(["train", "run.toml", "--name", "first", "--train.updates", "1", "--log.writers", "[]"])
    (folder / "run.toml").write_text(run_file(block, beside(block)))
    assert main(["check", "run.toml"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("block", [block for block in all_blocks("toml") if not is_slow(block)], ids=str)
def test_a_run_with_the_tables_of_a_block_is_built_and_tried(
    block: Block, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(block, recipe, capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("block", [block for block in all_blocks("toml") if is_slow(block)], ids=str)
def test_a_run_of_ranks_or_large_libraries_is_built_and_tried(
    block: Block, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(block, recipe, capsys)


@pytest.mark.parametrize("block", [block for block in all_blocks("toml") if is_slow(block)], ids=str)
def test_the_keys_and_values_of_a_block_that_is_built_slowly_are_right(block: Block, recipe: Path) -> None:
    (recipe / "run.toml").write_text(run_file(block, beside(block)))
    with open_run(recipe / "run.toml"):
        pass


def test_no_exception_is_for_a_block_that_is_gone() -> None:
    tables = all_blocks("toml")
    assert all(any(b.page == page and key in b.text for b in tables) for page, key in BESIDE)
    assert all(any(b.page == page and re.search(rf"\b{key}\b", b.text) for b in tables) for page, key in SLOWLY_BUILT)


def test_json_is_json() -> None:
    for block in all_blocks("json"):
        assert [json.loads(line) for line in block.text.splitlines()], str(block)


def test_yaml_is_only_where_it_is_compared_with_its_schema() -> None:
    assert {block.page for block in all_blocks("yaml")} == {"hosts"}
    assert "docs/hosts.md" in (ROOT / "tests/unit/test_public.py").read_text()


# -- commands


def commands() -> Iterator[tuple[str, str]]:
    """Where a command line stands, and it: those of blocks, of scripts within them, and of the prose."""
    for block in all_blocks("sh", "bash"):
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            yield str(block), line
    for page in PAGES:
        for span in re.findall(r"`([^`]+)`", outside_of_blocks(page)):
            line = " ".join(span.split())
            if re.match(r"(evenstep (\w|-)|make |torchrun .*-m |srun -|pip install )", line):
                yield f"{page}.md", completed(line)


def completed(line: str) -> str:
    """A command of the prose, with what it leaves to the reader: the path, the value of its last option, numbers."""
    words = line.split()
    own = COMMAND.get(words[1]) if words[0] == "evenstep" else None
    needs_path = own is not None and any(one.param_type_name == "argument" and one.required for one in own.params)
    if needs_path and words[2:3] in ([], *_options(words)):
        words.insert(2, "run.toml")
    required = [one.opts[0] for one in own.params if one.required and one.opts[0].startswith("--")] if own else []
    words += [option for option in required if option not in words]
    if words[-1].startswith("--") and words[0] == "evenstep" and not _is_flag(words[1], words[-1]):
        words.append("2")
    return " ".join("2" if re.fullmatch(r"[KN]|FEWER", word) else word for word in words)


def _options(words: list[str]) -> list[list[str]]:
    return [[word] for word in words if word.startswith("--")]


def _is_flag(command: str, option: str) -> bool:
    own = COMMAND.get(command)
    return own is not None and any(option in one.opts and one.is_flag for one in own.params)


COMMANDS = [
    (f"{where} {line[:60]}", shlex.split(line, comments=True))
    for where, line in dict.fromkeys(commands())
    if line.strip() and not line.strip().startswith("#") and "…" not in line
]
# what stands in the scripts for a cluster beside the commands that are looked at, and what no test could know
OTHER_PROGRAMS = {"export", "scontrol", "scancel", "if", "fi", "exit", "ssh", "hf"}


def program(words: list[str]) -> tuple[str, list[str]]:
    """The program of a line, past what starts it, and its arguments."""
    if "=$(" in words[0]:
        return words[0].partition("$(")[2], words[1:]
    while "=" in words[0] and words[0].split("=")[0].isidentifier():  # a variable, set
        words = words[1:]
        if not words:
            return "export", []
    if words[0] == "srun":
        words = words[next(n for n, word in enumerate(words[1:], 1) if not word.startswith("-")) :]
    if words[:3] == ["python", "-m", "evenstep"]:
        words = words[2:]
    elif words[0] == "python" and words[1].endswith(".py"):
        words = words[1:]
    return words[0], words[1:]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | list[str], list[str]]]:
    """What commands are told, in the place of what they do."""
    heard: list[tuple[str, str | list[str], list[str]]] = []

    def stand_in(target: str) -> Any:
        def listens(path: Any = "", settings: Any = (), *more: Any, **options: Any) -> int:
            heard.append((target, path, settings))
            return 0

        return listens

    monkeypatch.setattr("evenstep.cli.arguments.load", stand_in)
    return heard


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_a_command_is_one_that_there_is(
    where: str, words: list[str], told: list[Any], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, arguments = program(words)
    if name == "torchrun":
        name, arguments = under_torchrun(arguments)
    match name:
        case "evenstep":
            understood(arguments, told, capsys)
        case "make":
            there_to_make(arguments)
        case "pip":
            assert arguments[0] == "install"
            extras = re.search(r"evenstep\[(.*)\]", arguments[-1])
            assert set(extras[1].split(",") if extras else ()) <= set(re.findall(r"^(\w+) = \[", PYPROJECT, re.M))
        case _:
            assert name in OTHER_PROGRAMS or name.endswith(".py"), f"{where}: what is `{name}`?"


PYPROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def under_torchrun(arguments: list[str]) -> tuple[str, list[str]]:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(arguments)
    if given.module:
        assert given.training_script == "evenstep"
        return "evenstep", given.training_script_args
    return given.training_script, given.training_script_args


def understood(arguments: list[str], told: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The parser takes it, the run file is there, and its settings are those of a run that can be."""
    if arguments[:1] == ["--version"] or "--help" in arguments:
        return
    assert main(arguments) == 0, capsys.readouterr().err
    ((_, path, settings),) = told
    command = arguments[0]
    first = path[0] if isinstance(path, list) and path else path
    if isinstance(first, str) and first.endswith("run.toml"):
        assert first in ("run.toml", "mine/run.toml") or (ROOT / first).is_file(), first
    if command == "new":
        assert "--from" not in arguments or (ROOT / "recipes" / arguments[arguments.index("--from") + 1]).is_dir()
    elif command != "plan" and settings:
        own = [setting for setting in from_arguments(settings) if setting.path != ("recipe",)]
        with open_run(Path("run.toml"), [*own, *needed_beside(own)]):
            pass


def needed_beside(settings: list[Any]) -> list[Any]:
    """What stands in the run file that is meant: settings that say something of other values than the tiny recipe's."""
    keys = {".".join(setting.path) for setting in settings}
    needs = {
        "launch.lost_rank": ["--launch.ranks", "2"],
        "data.micro_batch_size": [],
        "launch.max_restarts": [],
    }
    return from_arguments([word for key in keys & needs.keys() for word in needs[key]])


def there_to_make(arguments: list[str]) -> None:
    target, values = arguments[0], dict(one.split("=", 1) for one in arguments[1:])
    assert re.search(rf"^{target}:", MAKEFILE, re.M), f"there is no `make {target}`"
    for name, value in values.items():
        assert re.search(rf"\$\({name}\)|^{name} \?=", MAKEFILE, re.M), f"`make {target}` takes no {name}"
        if name == "NAME":
            assert (ROOT / "benchmarks" / f"{value}.py").is_file()


@pytest.mark.parametrize(
    "words",
    [
        words
        for _, words in COMMANDS
        if words[:2] == ["evenstep", "plan"] and "--ranks" in words and words[2].startswith("--")
    ],
    ids=str,
)
def test_plans_are_drawn(words: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (written,) = (block.text for block in blocks("pipeline", "text") if block.text.startswith("0F0 0F1"))
    (recipe / "mine.txt").write_text(written)
    assert main(words[1:]) == 0, capsys.readouterr().err


def test_scripts_are_scripts() -> None:
    for block in all_blocks("bash"):
        assert subprocess.run(["bash", "-n"], input=block.text, text=True, check=False).returncode == 0, str(block)


def test_paths_of_this_repository_are_there() -> None:
    inside = re.compile(r"^(?:src|tests|docs|benchmarks|recipes|website)/[\w./-]+$")
    named = [(page, span) for page in PAGES for span in re.findall(r"`([^`\s]+)`", outside_of_blocks(page))]
    assert [(page, path) for page, path in named if inside.match(path) and not (ROOT / path).exists()] == []


# -- the table of the questions


def answers(column: int) -> list[str]:
    """The code spans of a column of the table "How do I …"."""
    rows = re.findall(r"^\| .*\|$", PAGES["faq"].read_text(), re.MULTILINE)[1:]
    return [span for row in rows for span in re.findall(r"`([^`]+)`", row.split(" | ")[column])]


@pytest.mark.parametrize("answer", [one for one in answers(2) if " = " in one and not one.startswith("target")])
def test_an_answer_for_a_run_file_is_a_run(answer: str, recipe: Path) -> None:
    (recipe / "model.safetensors").touch()
    (recipe / "run.toml").write_text(run_file(Block("faq", 0, "toml", f"{answer}\n"), needed_for(answer)))
    with open_run(recipe / "run.toml"):
        pass


def needed_for(answer: str) -> dict[str, Any]:
    if "early_stop" in answer:
        return {"evaluation": {"every_updates": 500}}
    return {"optimizer": {"groups": {answer.split(".")[2]: {"patterns": ["*"]}}}} if ".groups." in answer else {}


@pytest.mark.parametrize("answer", [one for one in answers(1) if re.match(r"\w+=|[A-Za-z_.]+\(", one)])
def test_an_answer_for_a_script_is_python_that_a_trainer_takes(answer: str) -> None:
    from torch.utils.data import Subset

    from evenstep.checkpoint import export_weights

    names = {**names_for("README"), "Subset": Subset, "export_weights": export_weights, "updates": 200}
    made = (
        f"Trainer(..., updates=200, folder='runs/mine', evaluations=MapData(held_out, global_batch_size=8), {answer})"
    )
    names["Trainer"](..., folder="runs/first", updates=1).train()
    if re.match(r"\w+=", answer):
        if "fsdp" not in answer and "wandb" not in answer:
            eval(made, names)
        else:  # which one process refuses, and which begins a run of its own
            eval(f"dict({answer})", names)
        return
    names["parameter"] = names["model"].encoder.weight
    names["trainer"] = names["Trainer"](
        ..., folder="runs/first", updates=2, evaluations={"valid": names["trainer_data"]()}
    )
    names["trainer"].resume()
    names["data"] = names["trainer_data"]()
    eval(answer.replace('load_weights(model, "model.safetensors")', 'load_weights(model, "runs/first")'), names)
