"""What is used of torch beside its public names is still as it was found, and stands in one folder."""

import ast
import functools
import inspect
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from evenstep import internals
from evenstep.optim.fused import take_step

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"
OURS = sorted((SOURCE / "internals").glob("*.py"))
OF_FSDP = {
    "_all_gather_result",
    "_fsdp_param_groups",
    "_get_fsdp_state",
    "_lazy_init",
    "_pre_backward",
    "_register_post_backward_hook",
    "_register_pre_backward_hook",
}
OF_TORCH = {
    "_autograd",  # and in it, as torch leaves hooks on saved tensors forbidden where a gradient can not be compiled
    "_saved_tensors_hooks_is_enabled",
    "_saved_tensors_hooks_enable",
    "_base",
    "_Orthogonal",
    "_non_persistent_buffers_set",
    "_buffers",
    "_backward_pre_hooks",
    "_compiled_call_impl",
    "_engine_run_backward",
    "_execution_engine",
    "_foreach_add_",
    "_forward_cls",
    "_foreach_copy_",
    "_foreach_div_",
    "_foreach_lerp_",
    "_foreach_mul_",
    "_foreach_norm",
    "_foreach_sub_",
    "_fused_adam_",
    "_fused_adamw_",
    "_fused_sgd_",
    "_backward_hooks",
    "_forward_hooks",
    "_post_accumulate_grad_hooks",
    "_forward_pre_hooks",
    "_global_optimizer_post_hooks",
    "_global_optimizer_pre_hooks",
    "_modules",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_orig_mod",
    "_parameters",
    "_profiler_enabled",
    "_register_backend",
    "_set_default_backend",
    "_set_default_timeout",
    "_set_grad_enabled",
    "_shutdown_workers",
    "_step_supports_amp_scaling",
    "_timeout",
    "_use_grad_for_differentiable",
    "_version",
    "_will_engine_execute_node",
    "_workers",
    "_world",
    "_wrapped_by_lr_sched",
}
PYTHONS = {"_asdict", "_exit", "_fields", "_on_queue_feeder_error", "_replace"}
METRICS = {"_computed", "_filter_kwargs", "_reductions", "_to_sync", "_update_count"}  # of torchmetrics
FILES = sorted(SOURCE.rglob("*.py"))


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
    made -= OF_TORCH | OF_FSDP  # else one object asks another of its class
    return {name for node in nodes if (name := private(node))} - made


def test_no_other_file_uses_names_of_torchs_that_begin_with_an_underscore() -> None:
    uses = {str(path.relative_to(SOURCE)): private_names(path) for path in FILES if path not in OURS}
    of_metrics = {"events/metrics/meters.py": METRICS, "train/tasks/metrics.py": METRICS}
    left = {name: found - PYTHONS - of_metrics.get(name, set()) for name, found in uses.items()}
    assert {name: found for name, found in left.items() if found} == {}


def test_nothing_of_torch_is_used_but_these() -> None:
    modules = {"_C", "_pytree", "_python_dispatch"}
    assert set().union(*map(private_names, OURS)) - modules <= OF_TORCH | OF_FSDP


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


def test_kernels_for_many_tensors_are_those_for_each() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.ones(4)]
    assert [float(norm) for norm in internals.foreach_norms(tensors)] == [5.0, 2.0]
    assert internals.foreach_norms(tensors, torch.float64)[0].dtype is torch.float64
    internals.foreach_multiply(tensors, 2.0)
    internals.foreach_divide(tensors, torch.tensor(4.0))
    internals.foreach_move(tensors, [torch.zeros(2), torch.zeros(4)], 0.5)
    assert tensors[0].tolist() == [0.75, 1.0]


def test_a_sparse_tensor_has_no_norm_here() -> None:
    with torch.sparse.check_sparse_tensor_invariants(True), pytest.raises(RuntimeError, match=r"(?i)sparse"):
        internals.foreach_norms([torch.eye(2).to_sparse()])


def test_every_write_into_a_tensor_counts() -> None:
    tensor = torch.zeros(2)
    before = internals.times_written(tensor)
    tensor.add_(1)
    assert internals.times_written(tensor) == before + 1


def test_a_backward_begins_with_the_gradient_that_is_given() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    internals.run_backward(weight * weight, torch.tensor(0.5))
    assert weight.grad == 3.0


def test_the_profiler_is_known_to_run() -> None:
    from torch.profiler import ProfilerActivity, profile

    assert not internals.profiler_runs()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert internals.profiler_runs()


def test_what_modules_hold_is_found() -> None:
    act = nn.Tanh()
    model = nn.Sequential(act, nn.BatchNorm1d(2), act)
    model.register_buffer("lasting", torch.zeros(1))
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    assert list(internals.children_of(model)) == ["0", "1", "2"]
    assert list(internals.parameters_of(model[1])) == ["weight", "bias"]
    assert list(internals.buffers_of(model)) == ["lasting", "passing"]
    assert not internals.has_hooks(model)
    model.register_forward_pre_hook(lambda *_: None)
    act.register_forward_hook(lambda *_: None)
    assert internals.has_hooks(model) and internals.has_hooks(act)


def test_what_is_called_with_an_optimizers_step_is_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not internals.has_step_hooks(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert internals.has_step_hooks(optimizer)
    assert not internals.has_gradient_hooks(optimizer.param_groups[0]["params"][0])
    model = nn.Sequential(nn.Linear(1, 1))
    assert not internals.has_foreign_hooks(model)
    model[0].register_forward_pre_hook(lambda *_: None)
    assert internals.has_foreign_hooks(model)


def test_options_of_torchs_compiler_are_known() -> None:
    asked = internals.compile_options(captured=True)
    known = cast("Any", import_module("torch._inductor.config")).get_config_copy()
    assert asked["fallback_random"] is asked["triton.cudagraphs"] is True and asked.keys() <= known.keys()


def test_every_shape_is_compiled_and_hooks_are_looked_for() -> None:
    config = cast("Any", import_module("torch._dynamo.config"))
    with config.patch(recompile_limit=8, accumulated_recompile_limit=256, skip_nnmodule_hook_guards=True):
        internals.compile_each_shape()
        assert config.recompile_limit > 1000 and config.accumulated_recompile_limit > 1000
        assert config.skip_nnmodule_hook_guards is False
        assert not getattr(config, "record_runtime_overhead", False)


def test_compiled_modules_are_told_from_others() -> None:
    model = nn.Linear(1, 1)
    assert internals.unwrapped(torch.compile(model, backend="eager")) is model and internals.unwrapped(model) is model
    assert not internals.compiled_in_place(model)
    model.compile(backend="eager")
    assert internals.compiled_in_place(model)


def test_optimizers_say_what_they_take_and_keep() -> None:
    def made(**options: object) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, **options)  # type: ignore[arg-type]

    assert internals.takes_scale(made(fused=True)) and not internals.takes_scale(made())
    hooked = made()
    assert not internals.has_state_hooks(hooked)
    hooked.register_state_dict_post_hook(lambda optimizer, state: None)
    assert internals.has_state_hooks(hooked)


def test_the_processes_of_a_loader_can_be_ended() -> None:
    replies = iter(torch.utils.data.DataLoader(list(range(4)), num_workers=1, persistent_workers=True))
    next(replies)
    (worker,) = internals.workers_of(replies)
    assert worker.is_alive()
    internals.end_workers(replies)
    assert not worker.is_alive()
    assert internals.workers_of(object()) == []


def test_groups_can_be_made_around_a_backend() -> None:
    import torch.distributed as dist

    store = cast("Any", dist).HashStore()
    backend = internals.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=10))
    internals.set_timeout(backend, timedelta(seconds=5))
    kind = internals.ProcessGroup.BackendType.GLOO
    group = internals.group_around(backend, kind, "cpu", store, 0, 1)
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0] and group.size() == 1
    assert dist.distributed_c10d._world.pg_names.get(group) is None  # which only init_process_group and new_group enter


def test_trees_of_tensors_and_stores_have_their_names() -> None:
    leaves, form = internals.pytree.tree_flatten({"a": [torch.ones(1), 2]})
    assert internals.pytree.tree_unflatten(leaves, form)["a"][1] == 2
    assert issubclass(internals.TCPStore, internals.Store) and issubclass(internals.PrefixStore, internals.Store)


def test_a_step_is_the_optimizers_own_whoever_watches_or_has_changed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.profiler import ProfilerActivity, profile

    def made() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        weight = torch.zeros(1, requires_grad=True)
        weight.grad = torch.ones(1)
        return weight, torch.optim.SGD([weight], lr=1.0)

    weight, plain = made()
    take_step(plain)
    assert weight.tolist() == [-1.0]
    told: list[str] = []
    plain.register_step_pre_hook(lambda *_: told.append("own"))
    take_step(plain)
    everywhere = register_optimizer_step_pre_hook(lambda *_: told.append("all"))
    take_step(made()[1])
    everywhere.remove()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        take_step(made()[1])
    assert told == ["own", "all"] and "Optimizer.step#SGD.step" in {event.key for event in seen.key_averages()}
    weight, scheduled = made()
    scheduled.step = lambda: told.append("an LR scheduler's")  # type: ignore[method-assign,assignment]
    take_step(scheduled)
    weight, changed = made()
    monkeypatch.setattr(torch.optim.SGD, "step", functools.wraps(torch.optim.SGD.step)(lambda _: told.append("mine")))
    take_step(changed)
    assert told[2:] == ["an LR scheduler's", "mine"] and weight.tolist() == [0.0]
