"""Parameters that updates train: those with `requires_grad` that the optimizer holds."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import final
from zlib import crc32

from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import first_of
from evenstep.errors import ArgumentError
from evenstep.internals import children_of, parameters_of
from evenstep.parallel import Reducers
from evenstep.precision import Precision
from evenstep.tensors import named_parameters

_requires_grad = attrgetter("requires_grad")
_params = itemgetter("params")


@final
class TrainedParameters:
    """Parameters that this rank trains.

    Args:
        model: on its device, wrapped by the strategy.
        optimizer: of its parameters, or of those that this rank steps.
        names: of the parameters in the optimizer's groups, over all ranks.

    Attributes:
        with_grad: parameters that get a gradient.
        outside: those of them that are not in the optimizer, by name; their gradients are dropped.
        stamp: checksum of the flags of all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        reducers: Reducers,
        precision: Precision,
    ) -> None:
        self.names = names
        self._model = model
        self._optimizer = optimizer
        self._reducers = reducers
        self._precision = precision
        self._by_name = named_parameters(model)
        self._parameters = list(self._by_name.values())
        self._held = frozenset(chain.from_iterable(names))
        self._grouped = self._groups()
        self._built_flags = list(map(_requires_grad, self._parameters))
        self.outside = self._with_grad(held=False)
        self._read_model()
        self._begin(self._built_flags)

    def follow(self) -> None:
        """Before an update: follow changes of `requires_grad`; ArgumentError if parameters were added or replaced."""
        self.check_groups()
        if not _are_same(list(chain.from_iterable(self._registries)), self._registered):
            now = named_parameters(self._model)
            for name in {**now, **self._by_name}:
                if now.get(name) is not self._by_name.get(name):
                    raise ArgumentError(
                        f"`{name}` was added to the model, taken out or replaced since the run was built: change "
                        f"parameters in place, or build a new trainer.",
                        field=name,
                    )
            self._read_model()
        flags = list(map(_requires_grad, self._parameters))
        if flags == self._flags:
            return
        for one in self._parameters:
            one.grad = None  # a frozen parameter keeps no gradient of before
        for name in self._with_grad(held=False):
            if name not in self.outside:
                raise ArgumentError(
                    f"`{name}` was unfrozen, but is not in the optimizer: build the optimizer from all parameters that "
                    f"are ever trained.",
                    field=name,
                )
        self._begin(flags)

    def state_dict(self) -> dict[str, dict[str, bool]]:
        """Flags now and when the run was built: of the optimizer's parameters, and of others that have changed."""
        return {
            name: {"now": one.requires_grad, "built": built}
            for (name, one), built in zip(self._by_name.items(), self._built_flags, strict=True)
            if name in self._held or one.requires_grad != built
        }

    def changed(self, state: Mapping[str, Mapping[str, bool]]) -> str:
        """Flags of the build that differ from a state, in words."""
        built = dict(zip(self._by_name, self._built_flags, strict=True))
        names = [name for name, flags in state.items() if name in self._held and built.get(name) != flags["built"]]
        return f"`requires_grad` of {first_of(names)} has changed" if names else ""

    def load_state_dict(self, state: Mapping[str, Mapping[str, bool]]) -> None:
        """Freeze and unfreeze as the saved run had; changes of the user's to the build stay."""
        for (name, one), built in zip(self._by_name.items(), self._built_flags, strict=True):
            saved = state.get(name)
            one.requires_grad_(saved["now"] if saved is not None and saved["built"] == built else built)

    def check_groups(self) -> None:
        """Raise ArgumentError unless the optimizer's groups are still those that the run was built with."""
        if not _are_same(self._groups(), self._grouped):
            raise ArgumentError(
                "the optimizer's groups have changed since the run was built: build the optimizer with all groups, and "
                "freeze the parameters of later ones.",
                field="optimizer",
            )

    def _groups(self) -> list[object]:
        return list(chain.from_iterable(map(_params, self._optimizer.param_groups)))

    def _begin(self, flags: list[bool]) -> None:
        self._flags = flags
        self.stamp = crc32(bytes(flags))
        self.with_grad = [one for one in self._parameters if one.requires_grad]
        trained = self._with_grad(held=True)
        self._precision.check_trained(trained)
        self._reducers.share(list(trained.values()))

    def _with_grad(self, *, held: bool) -> dict[str, nn.Parameter]:
        return {name: one for name, one in self._by_name.items() if one.requires_grad and (name in self._held) == held}

    def _read_model(self) -> None:
        modules = list(self._model.modules())
        self._registries = [held.values() for one in modules for held in (children_of(one), parameters_of(one))]
        self._registered = list(chain.from_iterable(self._registries))


def _are_same(now: Sequence[object], before: Sequence[object]) -> bool:  # of C functions: it runs in every update
    return len(now) == len(before) and all(map(is_, now, before))
