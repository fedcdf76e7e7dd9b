"""Private names of torch 2.11 to 2.15; `tests/unit/test_internals.py` fails when torch changes any of them."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from inspect import unwrap
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch.distributed has stores and groups without types, torch.utils.pytree is not in all versions
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torch.autograd import graph
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Store", "TCPStore", "TorchDispatchMode", "pytree"]

_torch = cast("Any", torch)
_backward = cast("Any", graph)._engine_run_backward
_nodes = logging.getLogger(graph.__name__)
_engine = cast("Any", torch.autograd).Variable._execution_engine
_optimizers = cast("Any", import_module("torch.optim.optimizer"))
_WRAPPED_STEP = cast("Any", Optimizer).profile_hook_step(Optimizer.step).__code__
_WITHOUT_GRAD = _optimizers._use_grad_for_differentiable(Optimizer.step).__code__
_BACKWARD_HOOKS = attrgetter("_backward_hooks")
_ACCUMULATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_IS_SPARSE = attrgetter("is_sparse")
_NORMS_TAKE_SPARSE = torch.__version__ >= "2.15"  # as versions, not as text


# --- Kernels of torch's optimizers: one launch for many tensors.

fused_adam, fused_adamw = _torch._fused_adam_, _torch._fused_adamw_
foreach_add, foreach_subtract = _torch._foreach_add_, _torch._foreach_sub_


def foreach_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """‖t‖₂ of each tensor, 0-dim, computed in `dtype` (None: in its own)."""
    if _NORMS_TAKE_SPARSE and any(map(_IS_SPARSE, tensors)):
        raise RuntimeError("norms of sparse tensors are norms of their coalesced values")
    return _torch._foreach_norm(tensors) if dtype is None else _torch._foreach_norm(tensors, 2, dtype)


def _unless_empty(act: Callable[..., object]) -> Callable[..., None]:
    def guarded(tensors: Sequence[Tensor], *given: Any) -> None:
        if tensors:  # a rank of a pipeline may have nothing to train
            act(tensors, *given)

    return guarded


foreach_multiply = _unless_empty(_torch._foreach_mul_)  # by a number
foreach_divide = _unless_empty(_torch._foreach_div_)  # by a tensor
foreach_copy = _unless_empty(_torch._foreach_copy_)
foreach_move = _unless_empty(_torch._foreach_lerp_)  # t ← t + share · (end - t), from the ends and the share


# --- Autograd.

set_grad_enabled = cast("Callable[[bool], None]", _torch._C._set_grad_enabled)
"""Function behind the class `torch.set_grad_enabled`, which takes three times as long."""

base_of = cast("Callable[[Tensor], Tensor | None]", attrgetter("_base"))
"""Tensor that another one is a view of; None for a tensor that is no view."""

profiler_runs = cast("Callable[[], bool]", cast("Any", torch.autograd)._profiler_enabled)


def times_written(tensor: Tensor) -> int:
    return tensor._version


def adds_to_gradients(nodes: Sequence[object]) -> bool:
    """True if the running backward adds to the `.grad` of leaves, by their accumulating nodes.

    torch raises inside `torch.autograd.grad`, which adds nothing, where it is asked for these leaves.
    """
    try:
        return all(map(_torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False


def run_backward(loss: Tensor, gradient: Tensor) -> None:
    """Backward from `loss`, beginning with `gradient`; the graph is freed.

    `torch.autograd.backward` first checks the gradient, which costs as much as three small kernels.
    """
    run = _backward if not loss.is_cpu or _nodes.isEnabledFor(logging.DEBUG) else _engine.run_backward
    run((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        return to_local()


# --- Hooks.


def _foreign(hooks: Any) -> bool:
    modules = (str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in (hooks or {}).values())
    return any(not module.startswith("evenstep.") for module in modules)


def has_gradient_hooks(parameter: Tensor) -> bool:
    return _foreign(parameter._backward_hooks) or _foreign(_ACCUMULATE_HOOKS(parameter))


def has_hooks(module: nn.Module) -> bool:
    one = cast("Any", module)
    return bool(one._forward_hooks or one._forward_pre_hooks)


def has_foreign_hooks(module: nn.Module) -> bool:
    """True if the user has hooks on the module or a part of it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(_foreign(getattr(part, kind)) for part in module.modules() for kind in kinds)


# --- Modules: their dicts, whose changes bypass `__setattr__`.


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, whose parameter names have no prefix; or `module` itself."""
    return cast("nn.Module", getattr(module, "_orig_mod", module))


def compiled_in_place(module: nn.Module) -> bool:
    return cast("Any", module)._compiled_call_impl is not None


children_of = cast("Callable[[nn.Module], dict[str, nn.Module]]", attrgetter("_modules"))
parameters_of = cast("Callable[[nn.Module], dict[str, nn.Parameter | None]]", attrgetter("_parameters"))
buffers_of = cast("Callable[[nn.Module], dict[str, Tensor | None]]", attrgetter("_buffers"))


def places_of(
    model: nn.Module, held_by: Callable[[nn.Module], Mapping[str, Tensor | None]]
) -> dict[int, tuple[str, ...]]:
    """All names of each parameter, or buffer, by its `id`: a tensor of shared modules has several."""
    places: dict[int, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        for key, one in held_by(module).items():
            if one is not None:
                places[id(one)] = (*places.get(id(one), ()), f"{name}.{key}" if name else key)
    return places


def is_saved(module: nn.Module, buffer: str) -> bool:
    return buffer not in cast("Any", module)._non_persistent_buffers_set


def share_contents(view: nn.Module, module: nn.Module) -> None:
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        view.__dict__[name] = module.__dict__[name]


# --- Optimizers.

TAKES_SCALE = "_step_supports_amp_scaling"
"""Attribute of optimizers whose kernel takes `grad_scale` and `found_inf`."""


def takes_scale(optimizer: Optimizer) -> bool:
    """True if the optimizer's kernels take `grad_scale` and `found_inf`, as torch's fused ones do, in all groups."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return bool(getattr(optimizer, TAKES_SCALE, False)) and all(group.get("fused", True) for group in groups)


def looks_at_gradients(optimizer: Optimizer) -> bool:
    """True if the user's code reads the gradients before the optimizer's kernel, and so before `grad_scale`."""
    one = cast("Any", optimizer)
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return True
    if _foreign(one._optimizer_step_pre_hooks) or _foreign(_optimizers._global_optimizer_pre_hooks):
        return True
    return not (getattr(type(optimizer), TAKES_SCALE, False) or _is_packaged(type(optimizer).step))


@lru_cache(maxsize=64)
def _is_packaged(step: Any) -> bool:
    return unwrap(step).__module__.startswith(("torch.optim.", "evenstep."))


def unwrapped_step(optimizer: Any) -> Callable[[Any], object] | None:
    """The optimizer's step without torch's wrapper, which costs ten small kernels; None if hooks or a profiler look."""
    step = type(optimizer).step
    if (
        getattr(step, "__code__", None) is _WRAPPED_STEP
        and "step" not in vars(optimizer)  # torch's LR schedulers put theirs there
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (_optimizers._global_optimizer_pre_hooks or _optimizers._global_optimizer_post_hooks)
        and not profiler_runs()
    ):
        return step.__wrapped__
    return None


@lru_cache(maxsize=64)
def is_torchs_step(step: Any) -> bool:
    return step.__code__ is _WITHOUT_GRAD and step.__wrapped__.__globals__["__name__"].startswith("torch.optim.")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """True if the user has hooks on the optimizer's step, or an LR scheduler of torch."""
    one = cast("Any", optimizer)
    hooks = (one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks)
    return "step" in vars(optimizer) or any(map(_foreign, hooks))


def has_state_hooks(optimizer: Optimizer) -> bool:
    return bool(cast("Any", optimizer)._optimizer_state_dict_post_hooks)


def say_stepped(optimizer: Optimizer) -> None:
    """Keep torch's LR schedulers from warning of a missing step."""
    vars(optimizer)["_opt_called"] = True


# --- Workers of loaders.


def workers_of(loader: object) -> list[Any]:
    return list(getattr(loader, "_workers", ()))


def end_workers(loader: object) -> None:
    """End a loader's processes now; torch waits for the garbage collector, which a traceback can delay."""
    shutdown = getattr(loader, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


# --- Process groups.


def group_around(backend: Any, kind: Any, device_type: str, store: Store, rank: int, ranks: int) -> ProcessGroup:
    """A process group of one backend. `new_group` must be called by all ranks and keeps the group for good."""
    group = cast("Any", ProcessGroup(store, rank, ranks))
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group


def set_timeout(backend: Any, timeout: timedelta) -> None:
    backend._set_default_timeout(timeout)


def nccl_around(store: Store, rank: int, ranks: int, timeout: timedelta, device: torch.device) -> Any:
    """NCCL's backend for a CUDA device, connected. NCCL would connect in the first collective, without timeout."""
    kind = cast("Any", dist).ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    backend = kind(store, rank, ranks, options)
    backend.eager_connect_single_device(device)
    return backend


def name_of_group(group: ProcessGroup) -> str:
    """Name of the group for functional collectives, from torch's table of all groups."""
    return cast("Any", dist.distributed_c10d)._world.pg_names[group]


# --- Compiler.


def compile_options(*, captured: bool = False) -> dict[str, Any]:
    """Random numbers as without compiling, kernels chosen by rules and not by timing; `captured`: as a CUDA graph."""
    options: dict[str, Any] = {"fallback_random": True}
    if captured:
        options["triton.cudagraphs"] = True
    with warnings.catch_warnings():  # torch's own, when its compiler is imported
        warnings.simplefilter("ignore")
        import_module("torch._inductor.compile_fx")
        if hasattr(import_module("torch._inductor.config"), "deterministic"):
            options["deterministic"] = True
    return options


def compile_each_shape() -> None:
    """Compile any number of shapes in this thread, and compile again after changes of hooks of inner modules.

    By default torch runs the ninth shape uncompiled, does not call hooks that are newer than the compilation, and looks
    for a profiler at each call, which takes as long as two small kernels.
    """
    config = cast("Any", import_module("torch._dynamo.config"))
    config.recompile_limit = max(config.recompile_limit, 1 << 20)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1 << 24)
    config.skip_nnmodule_hook_guards = False
    if hasattr(config, "record_runtime_overhead"):  # not in torch 2.11
        config.record_runtime_overhead = False
