"""The arrows of the house: who may import whom, read from the source without running it."""

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"
LEAVES = {"precision", "optim", "data", "events", "checkpoint"}
ROOT = {
    "arguments",
    "oom",
    "errors",
    "files",
    "internals",
    "process",
    "keys",
    "lazy",
    "tensors",
    "schema",
    "single_use",
    "training_mode",
    "usual_words",
    "version",
}
CORE = {"train", "pipeline", "parallel", *LEAVES}
OPTIONS = "options"  # names the core's classes for type checkers only, and loads none of it
# Each part, and the parts that it may import beside itself and the root modules.
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "parallel": set(),
    "pipeline": {"parallel"},
    OPTIONS: CORE,
    "train": {"pipeline", "parallel", *LEAVES, OPTIONS},
    "config": {*CORE, OPTIONS, "contrib"},  # whose constructors hold the defaults
    "contrib": CORE,
    "tools": {*CORE, OPTIONS, "config", "cli"},  # commands that `cli` knows by name only
    "integrations": CORE,  # of other libraries, which the core does not know
    "cli": {*CORE, OPTIONS, "config", "integrations"},
    "__init__": {*CORE, OPTIONS},
    "__main__": {"cli"},
}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imports(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """All of a file, also what stands in functions, and whether it is for type checkers."""
    return [
        (node, is_for_type_checkers(statement))
        for statement in ast.parse(path.read_text()).body
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def imported_parts(path: Path) -> set[str]:
    """The parts that a file imports; of a package's public names those that it holds itself."""
    names: set[str] = set()
    for node, for_types in imports(path):
        if for_types and path.name == "__init__.py":
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: relative imports hide where an arrow goes"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "evenstep" else {module}
    return {name.split(".")[1] for name in names if name.startswith("evenstep.")}


FILES = sorted(SOURCE.rglob("*.py"))
BY_TYPES = {SOURCE, SOURCE / "contrib" / "elastic"}  # in which two name each other for type checkers
FOLDERS = sorted({path.parent for path in FILES} - BY_TYPES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    if part in ROOT:
        assert imported_parts(path) <= ROOT
    else:
        assert imported_parts(path) <= ALLOWED[part] | ROOT | {part}


def imported_modules(path: Path, *, also_for_types: bool = False) -> set[Path]:
    """The files of this package that one imports as it runs, also in functions."""
    found: set[Path] = set()
    read = [
        node for node, for_types in imports(path) if not for_types or (also_for_types and path.name != "__init__.py")
    ]
    for node in read:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("evenstep"):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                home = SOURCE.joinpath(*name.split(".")[1:])
                candidates = (home.with_suffix(".py"), home / "__init__.py", home.parent.with_suffix(".py"))
                found |= {next((one for one in candidates if one.is_file()), home.parent / "__init__.py")}
    return found - {path}


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = {path: imported_modules(path) for path in FILES}
    while left and (free := [path for path, needed in left.items() if not needed & left.keys()]):
        left = {path: needed for path, needed in left.items() if path not in free}
    assert not {str(path.relative_to(SOURCE)) for path in left}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_files_and_folders_of_a_folder_import_each_other_one_way(folder: Path) -> None:
    def room(path: Path) -> str:
        return path.relative_to(folder).parts[0]

    rooms: dict[str, set[str]] = {}
    inside = [path for path in FILES if path.is_relative_to(folder) and path != folder / "__init__.py"]
    for path in inside:
        needed = imported_modules(path, also_for_types=True)
        rooms.setdefault(room(path), set()).update(room(one) for one in needed if one in inside)
    TopologicalSorter({one: needed - {one} for one, needed in rooms.items()}).prepare()  # raises on a circle


@pytest.mark.parametrize("stub", sorted(SOURCE.rglob("__init__.pyi")), ids=lambda one: one.parent.name)
def test_names_of_stubs_come_from_their_modules(stub: Path) -> None:
    module = import_module(".".join(stub.parent.relative_to(SOURCE.parent).parts))
    told = {
        alias.name: str(node.module)
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    files = {file.stem for file in stub.parent.glob("*.py")}
    lazy = {name for name in told if name not in vars(module)}
    assert not lazy & files, "importing such a file puts the module in the place of the name"
    for name, home in told.items():
        assert getattr(module, name) is getattr(import_module(home), name), f"{name} is not that of {home}"
    assert set(told) <= set(dir(module))


@cache
def loaded() -> list[list[str]]:
    """The modules that a Python beginning has after one public name, and those beside torch's after all of them."""
    code = "import sys, torch; had = set(sys.modules); import evenstep; evenstep.Trainer; one = [*sys.modules]\n"
    code += "from evenstep import *; import json; print(json.dumps([one, [m for m in sys.modules if m not in had]]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_the_library_imports_neither_config_nor_command_line_nor_heavy_extras() -> None:
    heavy = ["rich", "pydantic", "tensorboard", "jinja2", "safetensors", "sklearn", "evenstep.config", "evenstep.cli"]
    heavy += ["transformers", "peft", "evenstep.integrations.hf"]
    heavy += ["evenstep.contrib", "evenstep.tools"]
    assert not set(heavy) & set(loaded()[0])


def test_all_public_names_load_nothing_that_only_runs_need() -> None:
    heavy = [f"evenstep.train.{one}" for one in ("update.update", "loop", "setup", "engine_parts")]
    heavy += ["evenstep.pipeline.stage", "evenstep.checkpoint.write", "sysconfig"]
    assert not set(heavy) & set(loaded()[1])
