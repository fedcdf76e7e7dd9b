"""Settings of torch's compiler that have no public names."""

import warnings
from importlib import import_module
from typing import Any, cast


def compile_options(*, captured: bool = False) -> dict[str, Any]:
    """Options of torch's compiler: random numbers as without compiling, kernels chosen by rules and not by timing.

    Args:
        captured: whether CUDA launches all kernels of a graph at once (a CUDA graph).
    """
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
