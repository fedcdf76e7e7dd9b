"""What is used of torch beside its public names stands in one folder, and FSDP2 is still as it was found."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"
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
