"""The stepper of a run owns its optimizers: nobody else calls `step`.

If memory runs out before a step has written anything, unused memory is freed and the step is taken once more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from evenstep.errors import ArgumentError, OutOfMemoryError
from evenstep.internals import (
    foreach_copy,
    is_torchs_step,
    looks_at_gradients,
    takes_scale,
    times_written,
    unwrapped_step,
)
from evenstep.oom import give_back, is_out_of_memory
from evenstep.optim.fused import take_step
from evenstep.optim.optimizers import parts_of


class Stepper:
    """Takes the steps of the optimizers on the parameters as they are.

    Attributes:
        takes_scale: True if all kernels take `grad_scale` and `found_inf`.
        masters: float32 masters of the parameters that this rank steps, by name.
        rounded: names of the parameters that have a master on some rank.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizers: tuple[Any, ...] = parts_of(optimizer)
        self.takes_scale = all(map(takes_scale, self.optimizers))
        # the kernels read the scale as float32, too coarse for float64
        self._divides_exactly = self.takes_scale and all(one.dtype != torch.float64 for one in self.parameters)
        self.masters: Mapping[str, Tensor] = {}
        self.rounded: frozenset[str] = frozenset()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [one for group in self._groups for one in group["params"]]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def divides_in_kernel(self) -> bool:
        """True if the kernels divide gradients exactly, and nobody reads them before."""
        return self._divides_exactly and not any(map(looks_at_gradients, self.optimizers))

    @property
    def may_draw(self) -> bool:
        """True if the next step may draw random numbers: all but torch's own without hooks."""
        steps = map(unwrapped_step, self.optimizers)
        return not all(step is not None and is_torchs_step(step) for step in steps)

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Load the masters by parameter name; the model has their rounded values already."""

    def step(self, update: int, *, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Take the step of update `update`; OutOfMemoryError if there is no memory, before the step or half-way.

        Args:
            scale: divisor of the gradients, for the kernels.
            found_inf: 1.0 if the kernels must skip the step.
        """
        given = {"grad_scale": scale, "found_inf": found_inf}
        for_kernels = {name: value for name, value in given.items() if value is not None}
        for one in self.optimizers:
            vars(one).update(for_kernels)
        try:
            self._step(update)
        finally:
            for one in self.optimizers:
                for name in for_kernels:
                    del vars(one)[name]

    def _step(self, update: int) -> None:
        self._step_optimizers()

    def _step_optimizers(self, *, begun: bool = False) -> None:
        """Step all that is in the groups; `begun` says that other parameters have been stepped already."""
        for one in self.optimizers:
            if isinstance(one, SGD):
                _create_missing_momentum(one)
        if self.takes_scale and all(one.state for one in self.optimizers):  # kernels that allocate nothing
            self._take_steps()
            return
        before = {id(tensor): times_written(tensor) for tensor in self._tensors()}
        fault = ""
        for _ in range(2):
            try:
                self._take_steps()
                return
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                fault = str(error).splitlines()[0] if str(error) else type(error).__name__
            give_back()
            begun = begun or any(times_written(tensor) != before.get(id(tensor), 0) for tensor in self._tensors())
            if begun:
                break
        state = "some parameters are changed, so resume from the last checkpoint" if begun else "nothing was changed"
        raise OutOfMemoryError(
            f"memory ran out in the optimizer's step ({fault}); {state}. Use smaller micro-batches, a fused optimizer, "
            f"or one with less state."
        )

    def _take_steps(self) -> None:
        for one in self.optimizers:
            take_step(one)

    def _tensors(self) -> list[Tensor]:
        return [*self.parameters, *(tensor for one in self.optimizers for tensor in _tensors_in(one.state))]

    def _step_stand_ins(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], *, begun: bool = False) -> None:
        """Step the second of each pair in place of the first, with its state, and no other parameter."""
        place = {id(one): other for one, other in pairs}
        groups = self._groups
        held = [group["params"] for group in groups]
        for group, own in zip(groups, held, strict=True):
            group["params"] = [place[id(one)] for one in own if id(one) in place]
        self._move_states(pairs)
        try:
            self._step_optimizers(begun=begun)
        finally:
            self._move_states([(other, one) for one, other in pairs])
            for group, own in zip(groups, held, strict=True):
                group["params"] = own

    def _move_states(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for one in self.optimizers:
            for source, target in pairs:
                state = one.state.pop(source, None)
                if state is not None:
                    one.state[target] = state

    def _widen_state(self) -> None:
        """Cast 16-bit state that an optimizer's constructor has made to float32."""
        for one in self.optimizers:
            for state in one.state.values():
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and is_narrow(value):
                        state[name] = value.float()


@final
class MasterStepper(Stepper):
    """Steps float32 master weights, and gives the model their rounded values: θ ← Optimizer(θ, g, …), p ← round(θ).

    Checkpoints hold θ under the model's names. Elements of p that a hook writes between two updates are copied to θ;
    writes through `parameter.data` are not noticed.

    Args:
        parameters: float32 parameters by name; cast here, in place.
        format: number format of the rounded parameters.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], format: torch.dtype) -> None:
        super().__init__(optimizer)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = [one for one in self.parameters if id(one) in names]
        self._widen_state()
        self._masters = [nn.Parameter(one.detach().clone(), requires_grad=False) for one in self._parameters]
        self._pairs = list(zip(self._parameters, self._masters, strict=True))
        place = {id(one): master for one, master in self._pairs}
        self._stepped = [(one, place.get(id(one), one)) for one in self.parameters]
        self.masters = {names[id(one)]: master for one, master in self._pairs}
        self.rounded = frozenset(parameters)
        for parameter in parameters.values():
            parameter.data = parameter.data.to(format)
            parameter.grad_dtype = torch.float32
        self._written = self._marks()

    @torch.no_grad()
    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(values[name])
        self._written = self._marks()

    def _step(self, update: int) -> None:
        if self._marks() != self._written:
            self._follow_writes()
        for parameter, master in self._pairs:
            master.grad = parameter.grad
        try:
            self._step_stand_ins(self._stepped)
        finally:
            for master in self._masters:
                master.grad = None
        with torch.no_grad():
            foreach_copy(self._parameters, self._masters)
        self._written = self._marks()

    def _marks(self) -> list[int]:
        return [*map(times_written, self._parameters), *map(Tensor.data_ptr, self._parameters)]

    @torch.no_grad()
    def _follow_writes(self) -> None:
        for parameter, master in self._pairs:
            same = parameter == master.to(parameter.dtype)
            master.copy_(torch.where(same, master, parameter.to(master.dtype)))


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    for part in tree.values() if isinstance(tree, Mapping) else tree:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, dict | list | tuple):
            yield from _tensors_in(part)


def _create_missing_momentum(optimizer: SGD) -> None:
    # the fused kernel takes no parameter without momentum beside one with it; from 0, the first is the gradient
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        moving = [one for one in group["params"] if one.grad is not None]
        late = [one for one in moving if optimizer.state.get(one, {}).get("momentum_buffer") is None]
        if len(late) in (0, len(moving)):
            continue
        if group["dampening"]:
            raise ArgumentError(
                f"torch's fused SGD with a `dampening` can't step a parameter (of shape {list(late[0].shape)}) whose "
                f"first gradient comes later than others'; build it with `fused=False`.",
                field="optimizer",
            )
        for one in late:
            optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)


def is_narrow(parameter: Tensor) -> bool:
    """True for a tensor of 16 bits."""
    return parameter.dtype in (torch.bfloat16, torch.float16)
