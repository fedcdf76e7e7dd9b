"""Arrows of the house: who may import whom, and what is used of torch beside its public names."""

import ast
import inspect
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

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
    TopologicalSorter({path: imported_modules(path) for path in FILES}).prepare()  # raises on a circle


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


TEXTS = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py")) if path.parent.name != "internals"}
OWN = {"self", "cls", *(name for text in TEXTS.values() for name in re.findall(r"^ *class (\w+)", text, re.M))}
PYTHONS = {"_asdict", "_exit", "_fields", "_on_queue_feeder_error", "_replace"}
METRICS = {"_computed", "_filter_kwargs", "_reductions", "_to_sync", "_update_count"}  # of torchmetrics


def private_names(text: str) -> set[str]:
    """Names that begin with one underscore and are asked of another object, or of torch's modules."""
    code = re.sub(r'"""(?s:.*?)"""|#.*', "", text)
    names = set(re.findall(r"attr\([\w.]+, \"(_[a-z]\w*)\"", code))
    code = re.sub(r'"[^"\n]*"', '""', code).replace("super()", "self")
    names |= {f"_{name}" for owner, name in re.findall(r"([\w)\]]+)\._([a-z]\w*)", code) if owner not in OWN}
    for module, imported in re.findall(r"^ *from (torch\S*) import (.*)", code, re.M):
        names |= {one for one in re.split(r"\W+", f"{module} {imported}") if re.match(r"_[a-zA-Z]", one)}
    return names


def test_no_other_file_uses_names_of_torchs_that_begin_with_an_underscore() -> None:
    of_metrics = {"events/metrics/meters.py": METRICS, "train/tasks/metrics.py": METRICS}
    left: dict[str, set[str]] = {}
    for path, text in TEXTS.items():
        name = str(path.relative_to(SOURCE))
        made = {one for pair in re.findall(r"def (_\w+)|(?:self|cls)\.(_\w+)", text) for one in pair}
        left[name] = private_names(text) - made - PYTHONS - of_metrics.get(name, set())
    assert {name: found for name, found in left.items() if found} == {}


SUMS = (
    [(FSDPParamGroup, "_reset_iter_state", ("sharded_param.grad = None", "leaf.grad = None"))]
    if torch.__version__ >= (2, 15)
    else [(FSDPParam, "to_accumulated_grad_if_needed", ("self.reduce_dtype is None",))]
)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="`fsdp` is refused")
@pytest.mark.parametrize(
    ("owner", "name", "uses"),
    [
        (FSDPModule, "_get_fsdp_state", ()),
        (FSDPState, "_lazy_init", ("all_states",)),
        (FSDPState, "_post_forward", ("output = self._register_pre_backward_hook(output)",)),
        (FSDPState, "_pre_backward", ("self._states_to_backward_prefetch", "self._register_root_post_backward")),
        (FSDPParamGroup, "pre_forward", ("self._register_post_backward_hook(args, kwargs)", "self.unshard(")),
        (FSDPParamGroup, "post_backward", ("self.reduce_grads", "self.reshard()")),
        (FSDPParamGroup, "unshard", ("self.is_unsharded", "_all_gather_process_group")),
        (FSDPParamGroup, "wait_for_unshard", ("self._all_gather_result", "self._to_unsharded()")),
        *SUMS,
    ],
)
def test_fsdp2_still_does(owner: type, name: str, uses: tuple[str, ...]) -> None:
    done = getattr(owner, name)
    source = inspect.getsource(done.fget if isinstance(done, property) else done)
    assert [use for use in uses if use not in source] == []
