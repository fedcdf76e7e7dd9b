"""Compiles functions of tensors as one graph each, runs what was compiled, and counts how often something was.

What was compiled before is run by torch's comparisons alone; where one of them does not hold, it is compiled anew, and
said where that goes on and on. What the functions compute is not known here.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, cast, final

import torch

from evenstep.errors import TaskError, clause
from evenstep.events import Incident
from evenstep.internals.compiler import (
    NotCompiledError,
    as_compiled,
    compile_each_shape,
    guards_kept,
    is_compile_error,
    recompile_reason,
    saved_tensor_hooks_kept,
)
from evenstep.pipeline.compiled import Inductor, reason_of
from evenstep.train.compiled import REPEATED

_COMPILED, _CAPTURED = Inductor(), Inductor(captured=True)
_HOOKED = (
    "the forward has hooks on what is saved for its backward, as `torch.utils.checkpoint` and `save_on_cpu` have, "
    "which no gradient within a graph calls"
)


class Compiled(NamedTuple):
    """A function that runs as one graph.

    Args:
        known: runs what was compiled of it, if that was for such arguments; else raises NotCompiledError.
        anew: compiles it for such arguments, and runs that.
    """

    known: Callable[..., Any]
    anew: Callable[..., Any]


@final
class Compilations:
    """Compiles functions of tensors, counts how often, and says where that goes on and on.

    Args:
        device: on CUDA each graph is captured, so that it is launched as one.

    Attributes:
        total: how often something was compiled.
        repeated: how often of these for a function that had been compiled before.
    """

    def __init__(self, device: torch.device, report: Callable[[Incident], None], rank: int) -> None:
        self._thread = 0
        self._inductor = _CAPTURED if device.type == "cuda" else _COMPILED
        self._report, self._rank = report, rank
        self.total = self.repeated = 0
        self._times: Counter[int] = Counter()
        self._last: Hashable = None

    @property
    def captures(self) -> bool:
        """Whether a graph's outputs are overwritten by its next run, and its inputs should stay where they are."""
        return self._inductor is _CAPTURED

    def compile(self, function: Any, given: Sequence[str]) -> Compiled:
        """What runs `function`, which calls `only_compiled` first, as one graph; it is compiled when it is first run.

        torch looks for what it has compiled of a function by its code, of which each gets its own here: what is not
        compared, as it is always the same for one of them, would let another model's graph be taken for this one's.

        Args:
            given: what of its arguments, and of what it holds, is always as it was; see `guards_kept`.
        """
        function.__code__ = function.__code__.replace()
        own = cast("Any", {"guard_filter_fn": partial(guards_kept, given=given)})
        backend = cast("Any", self._inductor)
        anew = torch.compile(function, dynamic=False, fullgraph=True, backend=backend, options=own)
        return Compiled(as_compiled(function), anew)

    def known(self, compiled: Compiled, args: Sequence[Any]) -> Any:
        """Call what `compile` gave, if it was compiled for such arguments.

        Raises:
            NotCompiledError: it was not; nothing has happened.
        """
        if self._thread != get_ident():  # torch keeps its settings by thread
            compile_each_shape()
            self._thread = get_ident()
        if not self._times[id(compiled.anew)]:
            raise NotCompiledError
        if not self.captures:
            return compiled.known(*args)
        self._inductor.refuses = True
        try:
            return compiled.anew(*args)
        except Exception as error:
            if is_compile_error(error):
                raise NotCompiledError from error
            raise
        finally:
            self._inductor.refuses = False

    def run(self, compiled: Compiled, args: Sequence[Any], form: Hashable, update: int) -> Any:
        """Call what `compile` gave.

        Args:
            form: of the micro-batches, for people.

        Raises:
            TaskError: torch can't make one graph of it.
        """
        try:
            return self.known(compiled, args)
        except NotCompiledError:
            pass  # what follows would else be raised "during handling of" it
        graphs = self._inductor.graphs
        try:
            with saved_tensor_hooks_kept():
                given = compiled.anew(*args)
        except NotCompiledError as error:
            raise TaskError(
                f"update {update} was not compiled, as torch's compiler is switched off (`TORCH_COMPILE_DISABLE`, or "
                f"`torch.compiler.set_stance`). Switch it on, or set `compile` to 'off'."
            ) from error
        except Exception as error:
            hooked = "saved tensor hooks" in str(error)  # so `torch.func` says
            if not hooked and not is_compile_error(error):
                raise
            reason = _HOOKED if hooked else clause(reason_of(error))
            raise TaskError(
                f"update {update} can't be compiled as a whole: {reason}. Set `compile` to 'model', "
                f"which compiles what can be, or to 'off'."
            ) from error
        if self._inductor.graphs != graphs:
            self._count(id(compiled.anew), form, update)
        return given

    def _count(self, which: int, form: Hashable, update: int) -> None:
        self.total += 1
        self._times[which] += 1
        changed = f"micro-batches of {form} after {self._last}"
        if self._times[which] > 1:
            self.repeated += 1
            changed = f"what was {recompile_reason() or 'compared at each call'} when it was compiled before"
        self._last = form
        if self.total >= REPEATED and self.total & (self.total - 1) == 0:
            self._report(
                Incident(
                    kind="recompiled",
                    update=update,
                    message=f"the update was compiled {self.total} times up to update {update}, each time for seconds, "
                    f"as something else goes into it: {changed}. Let batches have few shapes (lengths padded to "
                    f"multiples, as many micro-batches in each update) and hooks change numbers only by learning "
                    f"rates, or set `compile` to 'model'.",
                    rank=self._rank,
                )
            )
