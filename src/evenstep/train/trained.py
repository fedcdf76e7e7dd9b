"""Parameters that updates train, followed from update to update.

A parameter is trained while it has `requires_grad` and the optimizer holds it. Hooks may freeze it
and unfreeze it.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import final
from zlib import crc32

from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import first_of
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import children_of, parameters_of
from evenstep.parallel import Reducers
from evenstep.pipeline.pipeline_model import in_stages
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
        reducers: sum the gradients of trained parameters.
        precision: refuses parameters that it can't train.

    Attributes:
        with_grad: parameters that get a gradient.
        outside: parameters that get a gradient but are not in the optimizer; it is dropped.
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
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._flags = list(map(_requires_grad, self._parameters))
        self._built_flags = self._flags
        self.outside = [one for name, one in self._by_name.items() if one.requires_grad and name not in self._held]
        self._places = _places(model)
        self._standing = [list(held) for held in self._places]
        self._begin()

    @property
    def outside_names(self) -> list[str]:
        """Names of the parameters in `outside`."""
        ids = {id(one) for one in self.outside}
        return [name for name, one in self._by_name.items() if id(one) in ids]

    def follow(self) -> None:
        """Before an update: follow changes of `requires_grad` since the last update.

        Raises:
            ArgumentError: model or optimizer have changed since the run was built.
            TaskError: nothing is left to train.
        """
        self.check_groups()
        if not _same(self._places, self._standing):
            self._check_model()
            self._places = _places(self._model)
            self._standing = [list(held) for held in self._places]
        flags = list(map(_requires_grad, self._parameters))
        if flags != self._flags:
            self._flags = flags
            self._check_flags()
            for one in self._parameters:
                one.grad = None  # a frozen parameter keeps no gradient of before
            self._begin()

    def state_dict(self) -> dict[str, dict[str, bool]]:
        """Flags now and when the run was built: of the optimizer's parameters, and of others that have changed."""
        return {
            name: {"now": one.requires_grad, "built": built}
            for (name, one), built in zip(self._by_name.items(), self._built_flags, strict=True)
            if name in self._held or one.requires_grad != built
        }

    def changed(self, state: Mapping[str, Mapping[str, bool]]) -> str:
        """Flags of the build that differ from a state, in words."""
        now = dict(zip(self._by_name, self._built_flags, strict=True))
        names = [name for name, flags in state.items() if name in self._held and now.get(name) != flags["built"]]
        return f"`requires_grad` of {first_of(names)} has changed" if names else ""

    def load_state_dict(self, state: Mapping[str, Mapping[str, bool]]) -> None:
        """Freeze and unfreeze as the saved run had; changes of the user's to the build stay."""
        for (name, one), built in zip(self._by_name.items(), self._built_flags, strict=True):
            saved = state.get(name)
            one.requires_grad_(saved["now"] if saved is not None and saved["built"] == built else built)

    def check_groups(self) -> None:
        """Raise ArgumentError unless the optimizer's groups are still those that the run was built with."""
        if not _same(list(map(_params, self._optimizer.param_groups)), self._groups):
            raise ArgumentError(
                "the optimizer's groups have changed since the run was built: build the optimizer with all groups, and "
                "freeze the parameters of later ones.",
                field="optimizer",
            )

    def _begin(self) -> None:
        self.with_grad = [one for one in self._parameters if one.requires_grad]
        trained = {name: one for name, one in self._by_name.items() if one.requires_grad and name in self._held}
        self.stamp = crc32(bytes(self._flags))
        self._precision.check_trained(trained)
        self._reducers.share(list(trained.values()))

    def _check_flags(self) -> None:
        known = {id(one) for one in self.outside}
        for name, one in self._by_name.items():
            if one.requires_grad and name not in self._held and id(one) not in known:
                raise ArgumentError(
                    f"`{name}` was unfrozen, but is not in the optimizer: build the optimizer from all parameters that "
                    f"are ever trained.",
                    field=name,
                )
        is_left = any(one.requires_grad for name, one in self._by_name.items() if name in self._held)
        if not is_left and not in_stages(self._model):  # other stages may have some left
            raise TaskError("all parameters of the optimizer have been frozen: leave some, or end the run.")

    def _check_model(self) -> None:
        now = named_parameters(self._model)
        for name in {**now, **self._by_name}:
            if now.get(name) is not self._by_name.get(name):
                raise ArgumentError(
                    f"`{name}` was added to the model, taken out or replaced since the run was built: change "
                    f"parameters in place, or build a new trainer.",
                    field=name,
                )


def _places(model: nn.Module) -> list[Collection[object]]:
    return [held.values() for module in model.modules() for held in (children_of(module), parameters_of(module))]


def _same(now: Sequence[Collection[object]], before: Sequence[Collection[object]]) -> bool:
    # called in every update, so without Python's bytecode for each object
    sizes = list(map(len, now)) == list(map(len, before))
    return sizes and all(map(is_, chain.from_iterable(now), chain.from_iterable(before)))
