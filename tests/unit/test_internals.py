"""What is used of torch beside its public names is still as it was found, and stands in one folder."""

import ast
import functools
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from evenstep import internals

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"
OURS = sorted((SOURCE / "internals").glob("*.py"))
PYTHONS = {"_asdict", "_exit", "_fields", "_on_queue_feeder_error", "_replace"}
METRICS = {"_computed", "_filter_kwargs", "_reductions", "_to_sync", "_update_count"}  # of torchmetrics
FILES = sorted(SOURCE.rglob("*.py"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def own_classes() -> set[str]:
    return {node.name for path in FILES for node in nodes_of(path) if isinstance(node, ast.ClassDef)}


def is_own(node: ast.Attribute) -> bool:
    """Whether it is asked of the object itself, of its class, or of one above."""
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and (value.id in ("self", "cls") or value.id in own_classes())


def is_asked_by_name(node: ast.AST) -> bool:
    """Whether it is a `getattr`, `hasattr` or `setattr` of a name that is written there."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr")
    return called and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)


def private(node: ast.AST) -> str:
    """What begins with one underscore and is asked of another object, or of torch's modules."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not is_own(node):
        names = [node.attr]
    elif is_asked_by_name(node):
        names = [str(cast("Any", node).args[1].value)]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Import):
        names = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
    return next((name for name in names if name.startswith("_") and not name.startswith("__")), "")


def private_names(path: Path) -> set[str]:
    nodes = nodes_of(path)
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    made |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_own(node)}
    return {name for node in nodes if (name := private(node))} - made


def test_no_other_file_uses_names_of_torchs_that_begin_with_an_underscore() -> None:
    uses = {str(path.relative_to(SOURCE)): private_names(path) for path in FILES if path not in OURS}
    of_metrics = {"events/metrics/meters.py": METRICS, "train/tasks/metrics.py": METRICS}
    left = {name: found - PYTHONS - of_metrics.get(name, set()) for name, found in uses.items()}
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


def test_options_of_torchs_compiler_are_known() -> None:
    asked = internals.compile_options(captured=True)
    known = cast("Any", import_module("torch._inductor.config")).get_config_copy()
    assert asked["fallback_random"] is asked["triton.cudagraphs"] is True and asked.keys() <= known.keys()
