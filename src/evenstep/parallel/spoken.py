"""What FSDP2 says to the other ranks in a pass, counted, so that a pass which broke off can be gone on with by another.

All passes say the same in the same order, whatever the batch. So where one has ended in the midst, another begins from
its start, and what the first has said already is answered by this rank itself instead of by its peers: the parameters
that it then computes with are wrong, and so is what comes of it, but its peers have somebody to talk to. Nobody may use
what such a pass gives.
"""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor


@final
class Spoken:
    """The words of one rank.

    Attributes:
        passes: how many have begun since `start`.
        broken: whether the next pass takes the place of one that has ended in the midst.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.broken = False
        self._said = 0  # in this pass
        self._skip = 0  # so many were said before it broke off
        self._parts: list[Any] = []
        self._reduced: set[int] = set()  # parts whose gradients are reduced in this pass

    def listen(self, part: Any, group: Any) -> None:
        """Count what `part` says.

        Args:
            part: an `FSDPModule`.
            group: FSDP2's record of its parameters.
        """
        # FSDP2 takes other collectives, but does not give its own (torch 2.11 to 2.13).
        part.set_custom_all_gather(_Collective(self, group._all_gather_comm, _gathered_from_oneself))
        part.set_custom_reduce_scatter(
            _Collective(self, group._reduce_scatter_comm, _reduced_to_nothing, self._reduced, len(self._parts))
        )
        self._parts.append(part)

    def start(self) -> None:
        """No pass has begun yet."""
        self.passes, self._said = 0, 0
        self._whole()

    def begin(self) -> None:
        """A pass begins."""
        if self.broken:
            self.broken = False
            for number, part in enumerate(self._parts):
                part.set_requires_all_reduce(number not in self._reduced, recurse=False)
        else:
            self.passes += 1
            self._whole()
        self._said = 0

    def go_on(self) -> None:
        """The pass has ended in the midst: the next one says only what is left."""
        if not self.passes:
            return
        self.broken, self._skip = True, max(self._skip, self._said)

    def _whole(self) -> None:
        if self._skip or self.broken:
            for part in self._parts:
                part.set_requires_all_reduce(True, recurse=False)
        self.broken, self._skip = False, 0
        self._reduced.clear()

    def say(self, collective: Callable[[], Any], oneself: Callable[[], None]) -> Any:
        """Do `collective`, or only `oneself` if it was done before the pass broke off."""
        result = oneself() if self._said < self._skip else collective()
        self._said += 1
        return result


@final
class _Collective:
    """A collective of FSDP2's, counted."""

    def __init__(
        self,
        spoken: Spoken,
        inner: Any,
        alone: Callable[[Tensor, Tensor], None],
        reduced: set[int] | None = None,
        number: int = 0,
    ) -> None:
        self._spoken, self._inner, self._alone = spoken, inner, alone
        self._reduced, self._number = reduced, number
        self.allocate = inner.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = self._spoken.say(
            lambda: self._inner(output_tensor, input_tensor, *args, **kwargs),
            lambda: self._alone(output_tensor, input_tensor),
        )
        if self._reduced is not None:
            self._reduced.add(self._number)
        return work


def _gathered_from_oneself(output: Tensor, own: Tensor) -> None:
    """As if all ranks held this one's shard: numbers as they may be."""
    output.view(-1, own.numel()).copy_(own.clone().expand(output.numel() // own.numel(), -1))


def _reduced_to_nothing(output: Tensor, own: Tensor) -> None:
    output.zero_()
