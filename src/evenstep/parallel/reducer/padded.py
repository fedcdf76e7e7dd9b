"""Shards that each pass gathers: all ranks must run the same passes, and say the same to each other in each.

A rank with fewer micro-batches than its peers runs some again, in dummy passes whose gradients are replaced by zeros
before anyone adds them. A rank that runs out of memory follows its peers in the same way until they reduce, and all
begin the update anew. How gradients are reduced is the variants'.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evenstep.errors import OutOfMemoryError
from evenstep.internals import at_end_of_backward, forget_order, parts, record
from evenstep.memory import give_back, is_out_of_memory
from evenstep.parallel.group import Group
from evenstep.parallel.reducer.reducer import ExplainsErrors, PadsPasses
from evenstep.parallel.reducer.sharded import ShardedReducer, Sharding
from evenstep.parallel.shardable import explained
from evenstep.parallel.spoken import Spoken

T = TypeVar("T")


class PaddedReducer(ShardedReducer, PadsPasses, ExplainsErrors):
    """Shards of a module that each pass gathers; the arguments are those of `ShardedReducer`."""

    def __init__(self, module: nn.Module, group: Group, sharding: Sharding) -> None:
        super().__init__(module, group, sharding)
        self._muted = False
        self._examples: dict[str, Any] = {}  # a micro-batch of each kind
        self._spoken = Spoken(group)
        self._follow: partial[bool] = partial(bool)  # runs a dummy pass
        self._halved: dict[str, Any] = {}  # a part of a micro-batch of each kind of which a whole one did not fit
        self._lost = False  # whether such a pass has taken gradients along when it broke off
        self._passes = 0  # of all ranks, in this update or evaluation

    def begin(self) -> None:
        self._spoken.start()
        self._reset()
        self._lost = False

    def pad_passes(
        self,
        work: Sequence[T],
        run: Callable[[T], None],
        *,
        halve: Callable[[T], T | None],
        backward: bool,
        kind: str = "",
        last: bool = True,
    ) -> None:
        self._spoken.finish()
        here = [0.0] * (2 * self.group.ranks)
        example: Any = work[0] if work else self._examples.get(kind)
        here[self.group.rank], here[self.group.ranks + self.group.rank] = len(work), float(example is not None)
        said = self.group.sum_floats(here)
        counts, have = said[: self.group.ranks], said[self.group.ranks :]
        self._passes = int(max(counts))
        self._spoken.start(kind)
        if not self._passes:  # the only one with such work has failed before it
            return
        if not all(have):
            giver = have.index(1.0)
            given = self.group.gather(example if self.group.rank == giver else None)[giver]
            example = given if example is None else example
        self._examples[kind] = example
        self._follow = partial(self._run_dummy, kind, self._halved.get(kind, example), run, halve)
        missing = self._passes - len(work)
        owed = backward and last and not work and missing > 0
        accumulated = any(self._present)  # by other kinds
        for _ in range(missing - owed):
            broke_off = self._follow()
            self._lost = self._lost or (accumulated and broke_off)
            if not accumulated:  # else zeros have been added
                self._forget_gradients()
        if owed:
            self._owe()

    @abstractmethod
    def _owe(self) -> None:
        """This rank has no micro-batch: `_follow` must take the place of its last backward, in which others reduce."""

    def _run_dummy(self, kind: str, example: T, run: Callable[[T], None], halve: Callable[[T], T | None]) -> bool:
        """Run a pass whose gradients are zeros; where memory runs out, half the samples go on where it broke off.

        Returns:
            Whether it has broken off, and with it what was in gradients before.
        """
        broke_off = False
        while True:
            self._muted = True
            try:
                run(example)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                half = halve(example)
                if half is None:
                    raise OutOfMemoryError(
                        f"rank {self.group.rank} has no memory even for the smallest part of a micro-batch, with which "
                        f"it was to take part in what the other ranks do. Use a smaller model, shorter samples, or "
                        f"more ranks to shard over."
                    ) from error
                example = self._halved[kind] = half
                broke_off = True
            else:
                return broke_off
            finally:
                self._muted = False
            self._break_off()

    def _break_off(self) -> None:
        """A pass has ended in the midst; the next one takes its place: what was said to the peers is not said again."""
        self._reset()
        give_back()
        self._spoken.go_on()

    def _follow_to_the_end(self, before_last: Callable[[], None]) -> None:
        """After a failure: take part in the passes that the peers still make, with half of what failed."""
        kind, example, run, halve = self._follow.args
        half = halve(example)
        self._follow = partial(self._run_dummy, kind, example if half is None else half, run, halve)
        self._break_off()
        while self._spoken.passes < self._passes or self._spoken.broken:
            if self._spoken.passes + (not self._spoken.broken) == self._passes:
                before_last()
            self._follow()
        self._spoken.finish()
        self._reset()

    def follow(self) -> None:
        self._follow_to_the_end(nothing)

    def any_failed(self, failed: bool) -> bool:
        if failed:
            self.follow()
        self._spoken.finish()
        return self.group.sum_floats([float(failed)])[0] > 0

    def explained(self, error: Exception) -> Exception:
        return explained(error, dict(self.module.named_parameters(remove_duplicate=False)))

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        super().share(parameters)
        self._spoken.forget()

    def _prepare(self) -> None:
        super()._prepare()
        self._listen()

    def _listen(self) -> None:
        """Let passes say the same to the other ranks, whatever each of them runs."""
        before: Any = None
        for name, part in parts(self.module):
            # By itself FSDP2 gathers ahead, in a backward, what went forward before on this rank: each its own.
            part.set_modules_to_backward_prefetch([before or part])
            at_end_of_backward(part, self._spoken.through)
            if (of_part := record(part)) is not None:
                self._spoken.listen(part, of_part, name, alone=self._sharding.layout.num_shards == 1)
            if self.group.device.type != "cpu":  # there, nothing is gathered while something is computed
                before = part
        if before is not None:
            self._fsdp.set_modules_to_backward_prefetch([before])
        # FSDP2's own hooks are not compiled either
        self._fsdp.register_forward_pre_hook(torch.compiler.disable(self._begin_pass), prepend=True)
        self._fsdp.register_forward_hook(torch.compiler.disable(self._end_forward))

    def _seen(self, number: int, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if self._muted else super()._seen(number, gradient)

    def _begin_pass(self, *_: Any) -> None:
        """Let all passes be alike: what FSDP2 remembers of those before would make it gather at other times."""
        self._spoken.begin()
        forget_order(self.module)

    def _end_forward(self, *_: Any) -> None:
        self._spoken.turn()


def nothing() -> None:
    """Do nothing."""
