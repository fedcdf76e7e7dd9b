"""What is used of torch's compiler beside its public names."""

import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

_LARGE = 1 << 15  # numbers; in a smaller tensor, to call a kernel of its own takes longer than that kernel saves


def compile_graph(graph: Any, inputs: Sequence[Any], *, captured: bool = False) -> Callable[..., Any]:
    """Compile a graph that `torch.compile` has found, for whom a backend of one's own sees what is compiled.

    Random numbers are then drawn by the kernels that draw them without compiling, and on an accelerator kernels are
    chosen by rules instead of by timing them, where this torch can. On a CPU with AVX2 the exact GELU of large float32
    tensors stays a kernel of oneDNN's, which takes 0.6 × the time of what torch's compiler writes for it; with AVX-512
    what it writes is the faster one (0.6 to 0.9 ×).

    Args:
        captured: whether CUDA launches all its kernels at once (a CUDA graph).
    """
    options = {"fallback_random": True}
    if captured:
        options["triton.cudagraphs"] = True
    with warnings.catch_warnings():  # torch's own, of what its compiler is made of
        warnings.simplefilter("ignore")
        compile_fx = cast("Any", import_module("torch._inductor.compile_fx")).compile_fx
        if hasattr(import_module("torch._inductor.config"), "deterministic"):
            options["deterministic"] = True
        on_cpu = all(one.device.type == "cpu" for one in inputs if isinstance(one, Tensor))
        if not on_cpu or torch.backends.cpu.get_cpu_capability() != "AVX2":
            return compile_fx(graph, inputs, config_patches=options)
        # torch's cache looks at all that it compiles by but at how operations are decomposed
        keys = cast("Any", import_module("torch.compiler.config"))
        with keys.patch(cache_key_tag=f"{keys.cache_key_tag} GELU of {_LARGE} numbers by oneDNN"):
            return compile_fx(graph, inputs, config_patches=options, decompositions=_decompositions())


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """How torch's compiler decomposes operations, but for exact GELUs of large float32 tensors and their backwards."""
    lowering = cast("Any", import_module("torch._inductor.lowering"))
    table = dict(cast("Any", import_module("torch._inductor.decomposition")).decompositions)
    for gelu in (torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default):
        lowering.make_fallback(gelu, lowering.require_contiguous, override_decomp=True)
        table[gelu] = partial(_unless_exact, table[gelu])
    return table


def _unless_exact(decompose: Callable[..., Any], *tensors: Tensor, approximate: str = "none") -> Any:
    """Decompose a GELU, unless it is an exact one of large float32 tensors."""
    if approximate == "none" and all(one.dtype == torch.float32 and one.numel() >= _LARGE for one in tensors):
        return NotImplemented
    return decompose(*tensors, approximate=approximate)


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


@contextmanager
def saved_tensor_hooks_kept() -> Generator[None]:
    """Let hooks on saved tensors be as they were: torch leaves them forbidden where a gradient can't be compiled."""
    hooks = cast("Any", torch._C)._autograd  # pyright: ignore[reportPrivateUsage]
    before = hooks._saved_tensors_hooks_is_enabled()
    try:
        yield
    finally:
        if before:
            hooks._saved_tensors_hooks_enable()


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


def cache_folder() -> str:
    """Where torch keeps what it has compiled, for other processes."""
    return cast("Any", import_module("torch._inductor.codecache")).cache_dir()
