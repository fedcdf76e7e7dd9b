"""What is used of torch that it does not promise to keep, each with the reason; nothing else here asks for it.

All of it is as it was found in torch 2.11 to 2.15, but where a release is named: `tests/unit/test_internals.py` fails
when torch changes any of it, or when another file uses a name of torch's that begins with an underscore. First what
belongs to tensors, modules, optimizers, the autograd engine and process groups, then FSDP2's, of torch 2.13 and newer.
"""

import logging
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torch.autograd import graph
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Store", "TCPStore", "TorchDispatchMode", "pytree"]
# `torch.distributed` has stores and groups without types, `torch.utils.pytree` is not in all versions, and the dispatch
# mode is documented under this name only.

_torch = cast("Any", torch)
_backward, _nodes = cast("Any", graph)._engine_run_backward, logging.getLogger(graph.__name__)
_engine = cast("Any", torch.autograd).Variable._execution_engine
_optimizers = cast("Any", import_module("torch.optim.optimizer"))
_WRAPPED_STEP = cast("Any", Optimizer).profile_hook_step(Optimizer.step).__code__
_BACKWARD_HOOKS, _ACCUMULATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_WITHOUT_GRAD = _optimizers._use_grad_for_differentiable(Optimizer.step).__code__
_IS_SPARSE, _NORMS_TAKE_SPARSE = attrgetter("is_sparse"), torch.__version__ >= "2.15"  # as versions, not as text
_profiler = cast("Callable[[], bool]", cast("Any", torch.autograd)._profiler_enabled)


def foreach_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """‖t‖₂ of each tensor, 0-dim, computed in `dtype` (None: in its own); this and the next four in one launch.

    torch's optimizers are made of these kernels, which have no public names.

    Raises:
        RuntimeError: a tensor is sparse, which the kernel itself refused before torch 2.15; the others refuse it still.
    """
    if _NORMS_TAKE_SPARSE and any(map(_IS_SPARSE, tensors)):
        raise RuntimeError("norms of sparse tensors are those of their coalesced values")
    return _torch._foreach_norm(tensors) if dtype is None else _torch._foreach_norm(tensors, 2, dtype)


def foreach_multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """t ← t · factor, in place."""
    if tensors:  # a rank of a pipeline may have nothing to train
        _torch._foreach_mul_(tensors, factor)


def foreach_divide(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """t ← t / divisor, in place; the divisor is 0-dim and stays on its device."""
    if tensors:
        _torch._foreach_div_(tensors, divisor)


def foreach_copy(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """t ← source, cast to the format of t, in place."""
    if tensors:
        _torch._foreach_copy_(tensors, sources)


def foreach_move(tensors: Sequence[Tensor], ends: Sequence[Tensor], share: float | Sequence[Tensor]) -> None:
    """t ← t + share · (end - t), in place."""
    if tensors:
        _torch._foreach_lerp_(tensors, ends, share)


def any_gradient_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether `has_gradient_hooks` is so for one of them; mostly none has any, which is seen at once."""
    if not any(map(_BACKWARD_HOOKS, parameters)) and not any(map(_ACCUMULATE_HOOKS, parameters)):
        return False
    return any(map(has_gradient_hooks, parameters))


set_grad_enabled = cast("Callable[[bool], None]", _torch._C._set_grad_enabled)
"""What `torch.set_grad_enabled` calls, which is a class that takes three times as long."""


class NoGrad:
    """`torch.no_grad()`, which takes five times as long."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self._before)


fused_adam, fused_adamw, fused_sgd = _torch._fused_adam_, _torch._fused_adamw_, _torch._fused_sgd_
foreach_add, foreach_subtract = _torch._foreach_add_, _torch._foreach_sub_
"""The kernels that torch's fused optimizers are made of."""

base_of = cast("Callable[[Tensor], Tensor | None]", attrgetter("_base"))
"""The tensor that one is a view of; None for one that is no view."""


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether something of the user's changes or takes the parameter's gradients; nothing public tells."""
    return bool(_foreign(parameter._backward_hooks)) or bool(accumulation_hook(parameter))


def accumulation_hook(parameter: Tensor) -> str:
    """The module of what of the user's is called each time the parameter's gradient was added to; "" for nothing."""
    return next(iter(_foreign(getattr(parameter, "_post_accumulate_grad_hooks", None))), "")


def _foreign(hooks: Any) -> list[str]:
    """The modules of hooks that are not ours."""
    places = [str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in (hooks or {}).values()]
    return [place for place in places if not place.startswith("evenstep.")]


def times_written(tensor: Tensor) -> int:
    """How often the tensor was written to in place: nothing public tells without reading its values."""
    return tensor._version


def function_behind(node: object) -> type[torch.autograd.Function] | None:
    """The `torch.autograd.Function` whose backward a node of a graph is; None for torch's own nodes."""
    return getattr(node, "_forward_cls", None)


def run_backward(loss: Tensor, gradient: Tensor) -> None:
    """Go back from `loss`, beginning with `gradient`; the graph is freed.

    `torch.autograd.backward` first looks at the gradient, which costs as much as three small kernels. What comes after
    that logs each node where that is asked for, and keeps Python's context for the threads of devices: the CPU goes
    back in this one.
    """
    go_back = _backward if not loss.is_cpu or _nodes.isEnabledFor(logging.DEBUG) else _engine.run_backward
    go_back((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def profiler_runs() -> bool:
    """Whether torch's profiler records now: names for what is done cost time, and nobody else sees them."""
    return _profiler()


def record_memory_history() -> None:
    """Record each allocation on CUDA devices from now on; what is recorded has no public names."""
    cast("Any", torch.cuda.memory)._record_memory_history(max_entries=1_000_000)


def save_memory_history(path: Path) -> None:
    """Write what was recorded, as torch's own page for it reads it."""
    cast("Any", torch.cuda.memory)._dump_snapshot(str(path))


def end_memory_history() -> None:
    """Record no more."""
    cast("Any", torch.cuda.memory)._record_memory_history(enabled=None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, whose parameter names have no prefix; or `module` itself."""
    return cast("nn.Module", getattr(module, "_orig_mod", module))


def say_stepped(optimizer: Optimizer) -> None:
    """Let a torch scheduler step that is asked ahead: it warns where the optimizer has made no step before it."""
    vars(optimizer)["_opt_called"] = True


def compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return cast("Any", module)._compiled_call_impl is not None


def compile_graph(graph: Any, inputs: Sequence[Any], *, captured: bool = False) -> Callable[..., Any]:
    """Compile a graph that `torch.compile` has found, for whom a backend of one's own sees what is compiled.

    Random numbers are then drawn by the kernels that draw them without compiling, and on an accelerator kernels are
    chosen by rules instead of by timing them, where this torch can.

    Args:
        captured: whether CUDA launches all its kernels at once (a CUDA graph).
    """
    options = {"fallback_random": True}
    if captured:
        options["triton.cudagraphs"] = True
    with warnings.catch_warnings():  # torch's own, of what its compiler is made of
        warnings.simplefilter("ignore")
        inductor = cast("Any", import_module("torch._inductor"))
        if hasattr(import_module("torch._inductor.config"), "deterministic"):
            options["deterministic"] = True
        return inductor.compile(graph, inputs, options=options)


def compile_each_shape() -> None:
    """Let this thread compile as many shapes as come, and anew where hooks of inner modules come or go.

    torch would run the ninth shape uncompiled, and not call hooks that were not there when it compiled. It would also
    look for a profiler at each call of what it has compiled, which takes as long as two small kernels.
    """
    config = cast("Any", import_module("torch._dynamo.config"))
    config.recompile_limit = max(config.recompile_limit, 1 << 20)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1 << 24)
    config.skip_nnmodule_hook_guards = False
    if hasattr(config, "record_runtime_overhead"):  # not in torch 2.11
        config.record_runtime_overhead = False


def graph_breaks() -> tuple[str, ...]:
    """Why torch has compiled something in several parts up to now: the first lines of its reasons."""
    counted = cast("Any", import_module("torch._dynamo.utils")).counters["graph_break"]
    return tuple(str(reason).strip().splitlines()[0] for reason in counted)


def recompile_reason() -> str:
    """Why torch has compiled last, where it had compiled the same code before: the guard that failed, or ""."""
    measured = cast("Any", import_module("torch._dynamo.utils")).get_compilation_metrics()
    told = getattr(measured[-1], "recompile_reason", None) if measured else None
    first = next(iter((told or "").splitlines()), "")
    return first.partition(": ")[2].partition("  #")[0].strip()


def keep_address(tensors: Sequence[Tensor]) -> None:
    """Tell torch's compiler that tensors stay where they are: a captured graph then writes to them without copies."""
    mark = cast("Any", import_module("torch._dynamo")).mark_static_address
    for tensor in tensors:
        mark(tensor)


def guards_kept(guards: Sequence[Any], given: Sequence[str]) -> list[bool]:
    """Which of torch's comparisons at each call of what it has compiled are kept: those with what may have changed.

    Left out are torch's own modules, Python's and this package's, what its caller looks after, and whether a transform
    of `torch.func` or a hook on saved tensors surrounds the call, as neither does an update: most of the time.

    Args:
        guards: as the option `guard_filter_fn` of `torch.compile` gives them.
        given: the arguments, or attributes of these ("step", "gradients.context"), that are always as they were.
    """
    kept: list[bool] = []
    for guard in guards:
        name = _LOCAL.sub(r"\1", _WRAPPED.sub("", str(guard.name)))
        ours = any(name == one or name.startswith((f"{one}.", f"{one}[", f"{one})")) for one in given)
        kept.append(not ours and not name.startswith(_FIXED) and guard.guard_type not in _NEVER_OTHERWISE)
    return kept


_WRAPPED, _LOCAL = re.compile(r"^(?:(?:type|dict|list|dict\.keys)\()+"), re.compile(r"^L\['(\w+)'\]")
_FIXED = (
    *(f"G['__import_{module}{end}" for module in ("torch", "evenstep") for end in ("']", "_dot_")),
    *("G['__builtins", "G['__import_contextlib']", "__import__('torch')"),
)
_NEVER_OTHERWISE = ("FUNCTORCH_STACK_MATCH", "AUTOGRAD_SAVED_TENSORS_HOOKS")


class NotCompiledError(Exception):
    """What is to be run has not been compiled for its arguments, or no longer."""


def only_compiled() -> None:
    """Raise NotCompiledError where Python runs this: the first line of a function that is given to `as_compiled`."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotCompiledError


def as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call what `torch.compile` has made of a function before, if it was for such arguments; else Python runs it.

    What `torch.compile` itself gives prepares each time to compile, which takes half of the time until the graph. It
    also counts its calls, by which captured CUDA graphs tell one step from the next; these need it.
    """
    follow = cast("Any", import_module("torch._dynamo.eval_frame")).set_eval_frame

    def run(*args: Any) -> Any:
        before = follow(False)  # look for what is compiled, and compile nothing
        try:
            return function(*args)
        finally:
            follow(before)

    return run


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether something of the user's would be called with the optimizer's step, or has been put in its place."""
    one = cast("Any", optimizer)
    if "step" in vars(optimizer):  # where torch's LR schedulers put theirs
        return True
    for hooks in (one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("evenstep."):
                return True
    return False


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether modules of `module`, or it itself, have hooks of the user's around their forwards or backwards."""
    hooks: list[Any] = []
    for part in module.modules():
        one = cast("Any", part)
        for held in (one._forward_hooks, one._forward_pre_hooks, one._backward_hooks, one._backward_pre_hooks):
            hooks += held.values()
    return any(not str(getattr(hook, "__module__", "")).startswith("evenstep.") for hook in hooks)


def is_compile_error(error: Exception) -> bool:
    """Whether it was raised by compiling, and not by what was compiled: its class, or one that this extends, is there.

    Shapes that depend on numbers end within `torch.func.grad` in an error of the symbols that stand for them.
    """
    compilers = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "torch._subclasses.", "torch.fx.")
    return any(kind.__module__.startswith(compilers) for kind in type(error).__mro__)


def cpp_compiler_fault() -> str:
    """Why no C++ compiler can be used by `torch.compile` for the CPU, or ""."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = cast("Any", import_module("torch._inductor.cpp_builder"))
    try:
        builder.get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - of several private classes, for each way in which it is missing
        return str(error).strip().splitlines()[0]
    return ""


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module itself has hooks around its backward."""
    one = cast("Any", module)
    return bool(one._backward_hooks or one._backward_pre_hooks)


def has_inner_hooks(module: nn.Module) -> bool:
    """Whether modules inside `module` have hooks of any kind around their forwards or backwards."""
    parts: list[Any] = [one for one in module.modules() if one is not module]
    return any(
        one._forward_hooks or one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks for one in parts
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module calls forward hooks, which can be registered but not asked for."""
    one = cast("Any", module)
    return bool(one._forward_hooks or one._forward_pre_hooks)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The live dict of a module's children: `named_children` leaves out one that stands there for the second time, and
    `add_module` refuses names that are also attributes, such as "layers" or "last".
    """
    return _live(cast("Any", module)._modules)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The live dict of a module's own parameters, to see whether others have taken their places."""
    return _live(cast("Any", module)._parameters)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The live dict of a module's own buffers, in which one can be put back without `__setattr__`."""
    return _live(cast("Any", module)._buffers)


def _live(own: Any) -> Any:
    """A module's dict; of a module of `torch.jit`, which has none, what it holds now."""
    return own if isinstance(own, dict) else dict(own.items())


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer is in its `state_dict`: only the module's list of those that are not tells."""
    return buffer not in cast("Any", module)._non_persistent_buffers_set


def share_contents(view: nn.Module, module: nn.Module) -> None:
    """Let one module hold all that another holds, also what is put there later."""
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        view.__dict__[name] = module.__dict__[name]


TAKES_SCALE = "_step_supports_amp_scaling"
"""The attribute by which an optimizer says that its kernel takes `grad_scale` and `found_inf`."""


def takes_scale(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel takes `grad_scale` and `found_inf`, as torch's fused ones do."""
    return bool(getattr(optimizer, TAKES_SCALE, False))


def unwrapped_step(optimizer: Any) -> Callable[[Any], object] | None:
    """The optimizer's step without what torch wraps around it; None where somebody would see the difference.

    The range that it records for a profiler and the search for hooks cost as much as ten small kernels.
    """
    step = type(optimizer).step
    if (
        getattr(step, "__code__", None) is _WRAPPED_STEP
        and "step" not in vars(optimizer)  # where torch's LR schedulers put theirs
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (_optimizers._global_optimizer_pre_hooks or _optimizers._global_optimizer_post_hooks)
        and not _profiler()
    ):
        return step.__wrapped__
    return None


@lru_cache(maxsize=64)
def is_torchs_step(step: Any) -> bool:
    """Whether a step without its wrapper is one that torch has written, and switches gradients off for."""
    return step.__code__ is _WITHOUT_GRAD and step.__wrapped__.__globals__["__name__"].startswith("torch.optim.")


def has_state_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks change what `state_dict` gives."""
    return bool(cast("Any", optimizer)._optimizer_state_dict_post_hooks)


def workers_of(loader: object) -> list[Any]:
    """The processes of a `DataLoader`'s iterator: to see that one has ended, and to end one that hangs."""
    return list(getattr(loader, "_workers", ()))


def end_workers(loader: object) -> None:
    """End a loader's processes now: torch does so when the garbage collector finds the iterator, which a traceback can
    delay without bound.
    """
    shutdown = getattr(loader, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds, sharing its memory; any other tensor itself.

    Asked without importing `DTensor`, which takes long, and without autograd, which would make a view.
    """
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        return to_local()


def group_around(backend: Any, kind: Any, device_type: str, store: Store, rank: int, ranks: int) -> ProcessGroup:
    """A process group in which one backend does all the work.

    `new_group` makes one as well, but keeps it for as long as the process lives, and all ranks must call it.
    """
    group = cast("Any", ProcessGroup(store, rank, ranks))
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set how long a backend's operations may take from now on; its constructor has another one, for connecting."""
    backend._set_default_timeout(timeout)


def nccl_around(store: Store, rank: int, ranks: int, timeout: timedelta) -> Any:
    """NCCL's backend for the current CUDA device; how long its operations may take is an option without public name."""
    kind = cast("Any", dist).ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, ranks, options)


def name_of_group(group: ProcessGroup) -> str:
    """The name by which functional collectives find the group, in torch's table of all groups."""
    return cast("Any", dist.distributed_c10d)._world.pg_names[group]


def parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that FSDP2 gathers at once, by name; the outermost, "", first."""
    from torch.distributed.fsdp import FSDPModule

    return ((name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule))


def class_before_sharding(module: nn.Module) -> Any:
    """The class of a module; FSDP2 gives what it shards one of its own, of that class and `FSDPModule`."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return next(base for base in kind.__bases__ if base is not FSDPModule) if isinstance(module, FSDPModule) else kind


def state(part: Any) -> Any:
    """FSDP2's state of a part: there is no public way to reduce outside of a backward, or to forget passes."""
    return part._get_fsdp_state()


def record(part: Any) -> Any | None:
    """FSDP2's record of a part's parameters, in which it keeps gradients before their reduction; None without any."""
    return next(iter(state(part)._fsdp_param_groups), None)


def forget_order(root: Any) -> None:
    """Forget in which order earlier passes went forward: FSDP2 would gather the next one's parts by it."""
    for _, part in parts(root):
        if (group := record(part)) is not None:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()


def begin(root: Any) -> None:
    """Make ready what FSDP2 makes in its first forward: a rank may reduce, or reset, before it has run any."""
    state(root)._lazy_init()


def end_backward(root: Any) -> None:
    """Do what FSDP2 does at the end of a backward: reduce what is not reduced yet, and wait for all that is.

    Since torch 2.15 it asks who ends the backward, which is decided when one begins; none need have begun here.
    """
    of_root = state(root)
    if getattr(of_root._state_ctx, "manual_backward_finalization_active", False) is None:
        of_root._state_ctx.manual_backward_finalization_active = False
    of_root._root_post_backward_final_callback()


def forget_gathers(root: Any) -> None:
    """Forget gathers that were begun and will not end: FSDP2 would wait for them before it forgets anything."""
    for _, part in parts(root):
        if (group := record(part)) is not None:
            group._all_gather_result = None


@contextmanager
def gathering_nothing(root: Any) -> Generator[None]:
    """Inside, modules compute with the parameters that they hold now: FSDP2 gathers and frees none of them.

    Its hooks still put inputs into the format of the parameters.
    """
    kept = [(of_part, of_part._fsdp_param_groups) for of_part in (state(part) for _, part in parts(root))]
    for of_part, _ in kept:
        of_part._fsdp_param_groups = []
    try:
        yield
    finally:
        for of_part, groups in kept:
            of_part._fsdp_param_groups = groups


_MANAGED = "_is_fsdp_managed_module"


@contextmanager
def looking_whole(root: Any) -> Generator[None]:
    """Inside, modules have their own classes, and no mark of FSDP2.

    Libraries look for them, and speak to other ranks where they are there: `generate` of transformers, in each step.
    """
    kinds = [(part, cast("Any", type(part))) for _, part in parts(root)]
    marked = [vars(module) for module in root.modules() if _MANAGED in vars(module)]
    for part, _ in kinds:
        part.__class__ = class_before_sharding(part)
    for attributes in marked:
        del attributes[_MANAGED]
    try:
        yield
    finally:
        for part, kind in kinds:
            part.__class__ = kind
        for attributes in marked:
            attributes[_MANAGED] = True


def at_end_of_backward(part: Any, act: Callable[[], None]) -> None:
    """Call `act` when all gradients of a backward have come, before FSDP2 does its rest: hooks only see one tensor."""
    of_part = state(part)
    rest = of_part._root_post_backward_final_callback

    def ends() -> None:
        act()
        rest()

    of_part._root_post_backward_final_callback = ends


def choose_formats(part: Any) -> None:
    """Choose a part's number formats anew: FSDP2 has done so once, by what was trained in its first pass."""
    if (group := record(part)) is not None:
        group._init_mp_dtypes()


def collectives(group: Any) -> tuple[Any, Any]:
    """How FSDP2 gathers and how it reduces a part: it takes others', but does not give its own."""
    return group._all_gather_comm, group._reduce_scatter_comm


def gather_now(group: Any) -> None:
    """Gather a part as peers do, and leave it as it was; by itself FSDP2 does not gather what is gathered."""
    group.wait_for_unshard()
    kept = group.is_unsharded
    group._to_sharded()
    group.unshard()
    group.wait_for_unshard()
    if not kept:
        group._to_sharded()


def reduce_now(group: Any) -> None:
    """Reduce a part's gradients, or zeros, as at the end of its backward."""
    group.post_backward()


def gradient_of(shard: Any) -> Tensor | None:
    """The gradient that FSDP2 has kept from reduction: as autograd left it, or already in the format to reduce in.

    Before torch 2.15 it keeps sums over backwards in that format beside `.grad`; since then all are in `.grad`.
    """
    kept = shard.unsharded_accumulated_grad
    return shard.unsharded_param.grad if kept is None else kept


def forget_gradient(shard: Any) -> None:
    """Forget what `gradient_of` would give."""
    shard.unsharded_param.grad = None
    if _sums_beside(shard):
        shard.unsharded_accumulated_grad = None


def add_late_gradient(shard: Any) -> None:
    """Add what came into `.grad` after a backward to its sum, as FSDP2 does at the end of one."""
    if _sums_beside(shard):
        shard.accumulate_unsharded_grad_if_needed()
        shard.to_accumulated_grad_if_needed()


def complete_sums(group: Any) -> None:
    """Let no part hold sums beside nothing: FSDP2 takes zeros in the gathered format for what has no gradient.

    Before torch 2.15 it then fails where sums are in a wider one (https://github.com/pytorch/pytorch/issues/196996).
    """
    shards = [one for one in group.fsdp_params if _sums_beside(one)]
    if all(shard.unsharded_accumulated_grad is None for shard in shards):
        return
    for shard in shards:
        if shard.unsharded_accumulated_grad is None and shard.unsharded_param.requires_grad:
            shard.unsharded_accumulated_grad = torch.zeros_like(shard.unsharded_param, dtype=shard.reduce_dtype)


def _sums_beside(shard: Any) -> bool:
    """Whether FSDP2 keeps sums beside `.grad`: since torch 2.15 the name is a property that gives `.grad`."""
    return "unsharded_accumulated_grad" in vars(shard)


def leave_inputs_alone(part: Any) -> None:
    """Let a part use its inputs themselves.

    To find the end of a part's backward, FSDP2 passes its inputs through an identity, in which autograd sums what comes
    back from several uses of one input within the part before it adds what comes from elsewhere: other bits than
    without it. Here the end is found by hooks, which change nothing. An input that others use as well gets its gradient
    later, and a leaf, as in a re-entrant checkpoint, may get it before the part is through: then the part stays
    gathered until the backward ends. So it does between two calls one of which takes what the other gives: where that
    gradient comes, FSDP2 has the earlier one begin, before hooks that were put there later.
    """
    group, begin_backward = record(part), state(part)._pre_backward

    def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.is_grad_enabled():
            return args, kwargs
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad]
        inputs = {id(one): one for one in tensors}
        own = any(begin_backward in (_BACKWARD_HOOKS(one) or {}).values() for one in inputs.values())
        if own or any(one.is_leaf for one in inputs.values()):
            return args, kwargs
        countdown = _countdown(len(inputs), cast("Any", group).post_backward)
        for one in inputs.values():
            one.register_hook(countdown)
        return args, kwargs

    if group is not None:
        group._register_post_backward_hook = watch


def _countdown(count: int, act: Callable[[], None]) -> Callable[[Tensor], None]:
    left = count

    def arrived(gradient: Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            left = count
            act()

    return arrived
