"""Parameters that updates train, followed from update to update.

A parameter is trained while it has `requires_grad` and the optimizer holds it. Hooks may freeze and unfreeze what the
optimizer holds; the next update follows. Another model or other parameter groups than those that the run was built with
are refused.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import final
from zlib import crc32

from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import first_of
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import children_of, parameters_of
from evenstep.pipeline.pipeline_model import in_stages
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
        share: called with the parameters whose gradients are summed over ranks, now and after each change.
        check: raises for parameters, by name, that must not be trained as they are.

    Attributes:
        with_grad: parameters that get a gradient.
        outside: parameters that get a gradient but are not in the optimizer; it is dropped.
        stamp: checksum of what is trained.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)); _ = model[0].requires_grad_(False)
    >>> sgd = __import__("torch").optim.SGD(model.parameters(), lr=0.1)
    >>> names = [[name for name, _ in model.named_parameters()]]
    >>> trained = TrainedParameters(model, sgd, names, share=lambda those: print(len(those)), check=lambda those: None)
    2
    >>> trained.follow(); _ = model.requires_grad_(True); trained.follow()
    4
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        *,
        share: Callable[[Sequence[nn.Parameter]], None],
        check: Callable[[Mapping[str, nn.Parameter]], None],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._by_name = named_parameters(model)
        self._parameters = list(self._by_name.values())
        self.names = names
        self._held = frozenset(chain.from_iterable(names))
        self._share, self._check = share, check
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._remember()
        self._built = self._flags = list(map(_requires_grad, self._parameters))
        self.outside = [one for name, one in self._by_name.items() if one.requires_grad and name not in self._held]
        self._begin()

    @property
    def outside_names(self) -> list[str]:
        """Names of the parameters in `outside`."""
        ids = {id(one) for one in self.outside}
        return [name for name, one in self._by_name.items() if id(one) in ids]

    def follow(self) -> None:
        """Before an update: follow changes of `requires_grad` since the last one.

        Raises:
            ArgumentError: model or optimizer have changed since the run was built.
            TaskError: nothing is left to train.
        """
        now = [*self._places, *map(_params, self._optimizer.param_groups)]
        # once in every update, so without Python's bytecode for each
        if list(map(len, now)) != self._counts or not all(map(is_, chain.from_iterable(now), self._standing)):
            self.check_groups()
            self._check_model()
            self._remember()
        flags = list(map(_requires_grad, self._parameters))
        if flags != self._flags:
            self._flags = flags
            self._changed()

    def state_dict(self) -> dict[str, dict[str, bool]]:
        """Flags now and when the run was built: of the optimizer's parameters, and of others that have changed."""
        return {
            name: {"now": one.requires_grad, "built": built}
            for (name, one), built in zip(self._by_name.items(), self._built, strict=True)
            if name in self._held or one.requires_grad != built
        }

    def changed(self, state: Mapping[str, Mapping[str, bool]]) -> str:
        now = dict(zip(self._by_name, self._built, strict=True))
        names = [name for name in state if name in self._held and state[name]["built"] != now.get(name)]
        told = {was: [name for name in names if state[name]["built"] == was] for was in (True, False)}
        return "; ".join(
            f"`requires_grad` of {first_of(those)} was {was} and is now {not was}"
            for was, those in told.items()
            if those
        )

    def load_state_dict(self, state: Mapping[str, Mapping[str, bool]]) -> None:
        """Freeze and unfreeze as the saved run had; what the user has changed since that was built stays changed."""
        for (name, one), built in zip(self._by_name.items(), self._built, strict=True):
            saved = state.get(name)
            one.requires_grad_(saved["now"] if saved is not None and saved["built"] == built else built)

    def check_groups(self) -> None:
        """Raise ArgumentError unless the optimizer's groups are still those that the run was built with."""
        held = list(map(_params, self._optimizer.param_groups))
        if list(map(len, held)) == list(map(len, self._groups)) and all(
            map(is_, chain.from_iterable(held), chain.from_iterable(self._groups))
        ):
            return
        raise ArgumentError(
            f"the optimizer had {len(self._groups)} groups when the run was built, and has {len(held)} or others now: "
            f"give it all groups before, and freeze what is trained later.",
            field="optimizer",
        )

    def _remember(self) -> None:
        self._places = _places(self._model)
        held = [*self._places, *map(_params, self._optimizer.param_groups)]
        self._counts, self._standing = list(map(len, held)), list(chain.from_iterable(held))

    def _begin(self) -> None:
        self.with_grad = [one for one in self._parameters if one.requires_grad]
        trained = {name: one for name, one in self._by_name.items() if one.requires_grad and name in self._held}
        self.stamp = crc32(bytes(self._flags))
        self._check(trained)
        self._share(list(trained.values()))

    def _changed(self) -> None:
        known = {id(one) for one in self.outside}
        for name, one in self._by_name.items():
            if one.requires_grad and name not in self._held and id(one) not in known:
                raise ArgumentError(
                    f"`{name}` was unfrozen, but is not in the optimizer: build the optimizer from all parameters that "
                    f"are ever trained.",
                    field=name,
                )
        others = in_stages(self._model)  # may have some left
        if not others and not any(one.requires_grad for name, one in self._by_name.items() if name in self._held):
            raise TaskError("all parameters of the optimizer have been frozen: leave some, or end the run.")
        for one in self._parameters:
            one.grad = None  # what is frozen now keeps no gradient of before
        self._begin()

    def _check_model(self) -> None:
        now = named_parameters(self._model)
        changed = [name for name in {**now, **self._by_name} if now.get(name) is not self._by_name.get(name)]
        if changed:
            raise ArgumentError(
                f"`{changed[0]}` was added to the model, taken out or replaced since the run was built: change "
                f"parameters in place, or build a new trainer.",
                field=changed[0],
            )


def _places(model: nn.Module) -> list[Collection[object]]:
    return [held.values() for module in model.modules() for held in (children_of(module), parameters_of(module))]
