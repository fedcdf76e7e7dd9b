"""Which parameters updates train, followed from update to update.

A parameter is trained while it has `requires_grad` and the optimizer holds it. A hook may freeze and unfreeze what the
optimizer holds, and the next update does so: its gradients, their sums over ranks and their norm are those of what is
trained then. What would have no effect is refused by name: another module or parameter in the place of one that the
trainer was built with, another parameter group, a parameter unfrozen that the optimizer does not hold. It looks at
objects only, at no values.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import final
from zlib import crc32

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import first_of
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import accumulation_hook, children_of, has_gradient_hooks, num_gradient_hooks, parameters_of
from evenstep.names import named_parameters
from evenstep.pipeline.pipeline_model import in_stages

_requires_grad = attrgetter("requires_grad")
_params = itemgetter("params")


@final
class TrainedParameters:
    """The parameters that this rank trains.

    Args:
        model: on its device, wrapped by the strategy.
        optimizer: of its parameters, or of those that this rank steps.
        names: of the optimizer's groups' parameters, over all ranks.
        share: told whose gradients are to be summed over ranks, now and whenever that changes.
        check: raises for parameters, by name, that must not be trained as they are.

    Attributes:
        names: see the arguments.
        with_grad: the parameters that get a gradient.
        outside: those of them that the optimizer does not hold, whose gradient is not kept.
        stamp: a number that ranks which train the same parameters have in common.

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
        self._stand()
        self._built = self._flags = list(map(_requires_grad, self._parameters))
        self.outside = [one for name, one in self._by_name.items() if one.requires_grad and name not in self._held]
        self._begin()

    @property
    def outside_names(self) -> list[str]:
        """The names of those that get a gradient though the optimizer does not hold them."""
        ids = {id(one) for one in self.outside}
        return [name for name, one in self._by_name.items() if id(one) in ids]

    def follow(self) -> None:
        """Before an update: take note of what was frozen and unfrozen since the last one.

        Raises:
            ArgumentError: model or optimizer have become others than the trainer was built with, or something is done
                with gradients before they are complete.
            TaskError: nothing is left to train.
        """
        now = [*self._places, *map(_params, self._optimizer.param_groups)]
        # once in every update, so without Python's bytecode for each
        if list(map(len, now)) != self._counts or not all(map(is_, chain.from_iterable(now), self._standing)):
            self.check_groups()
            self._check_places()
            self._stand()
        hooks = num_gradient_hooks(self._parameters)
        if hooks != self._num_hooks:
            check_gradient_hooks(self._by_name)
            self._num_hooks = hooks
        flags = list(map(_requires_grad, self._parameters))
        if flags != self._flags:
            self._flags = flags
            self._changed()

    def state_dict(self) -> dict[str, dict[str, bool]]:
        """Which parameters are trained now and when the trainer was built: the optimizer's, and what has changed."""
        return {
            name: {"now": one.requires_grad, "built": built}
            for (name, one), built in zip(self._by_name.items(), self._built, strict=True)
            if name in self._held or one.requires_grad != built
        }

    def changed(self, state: Mapping[str, Mapping[str, bool]]) -> str:
        """What is said of the optimizer's parameters that were frozen, or not, when the saved run was built; or ""."""
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

    def _stand(self) -> None:
        """Note where all stands: how much each module and group holds, and what."""
        self._places = _places(self._model)
        held = [*self._places, *map(_params, self._optimizer.param_groups)]
        self._counts, self._standing = list(map(len, held)), list(chain.from_iterable(held))

    def _begin(self) -> None:
        self.with_grad = [one for one in self._parameters if one.requires_grad]
        trained = {name: one for name, one in self._by_name.items() if one.requires_grad and name in self._held}
        self.stamp = crc32(bytes(self._flags))
        self._check(trained)
        self._share(list(trained.values()))
        self._num_hooks = num_gradient_hooks(self._parameters)

    def _changed(self) -> None:
        known = {id(one) for one in self.outside}
        lost = [
            name
            for name, one in self._by_name.items()
            if one.requires_grad and name not in self._held and id(one) not in known
        ]
        if lost:
            raise ArgumentError(
                f"`{lost[0]}` was unfrozen, but the optimizer does not hold it, so it would not be trained; build the "
                f"optimizer from all parameters that are ever to be trained, also those that are frozen at first."
            )
        others = in_stages(self._model)  # may have some left
        if not others and not any(one.requires_grad for name, one in self._by_name.items() if name in self._held):
            raise TaskError(
                "all parameters of the optimizer have been frozen, so there is nothing left to train; end the run with "
                "`request_stop`, or leave some `requires_grad`."
            )
        for one in self._parameters:
            one.grad = None  # what is frozen now keeps no gradient of before
        self._begin()

    def _check_places(self) -> None:
        """Raise ArgumentError unless the model's parameters are still those that it was built with."""
        now = named_parameters(self._model)
        kept, anew = "what is trained is what the model held then", "build a new trainer or engine of the changed model"
        for name, one in now.items():
            if name not in self._by_name:
                raise ArgumentError(
                    f"`{name}` has become a parameter of the model since training was set up, so it would not be "
                    f"trained: {kept}. Add it before, or {anew}."
                )
            if one is not self._by_name[name]:
                raise ArgumentError(
                    f"`{name}` of the model has been replaced by another parameter since training was set up, so it "
                    f"would not be trained: {kept}. Change it in place (`with torch.no_grad(): parameter.copy_(…)`, or "
                    f"`load_state_dict`), or {anew}."
                )
        gone = [name for name in self._by_name if name not in now]
        if gone:
            raise ArgumentError(
                f"`{gone[0]}` has been taken out of the model since training was set up: {kept}. Freeze it with "
                f"`requires_grad_(False)`, or {anew}."
            )

    def check_groups(self) -> None:
        """Raise ArgumentError unless the optimizer's groups are still those that it was built with."""
        held = [group["params"] for group in self._optimizer.param_groups]
        now, before = list(map(len, held)), list(map(len, self._groups))
        if now == before and all(map(is_, chain.from_iterable(held), chain.from_iterable(self._groups))):
            return
        counts = f"{before} parameters and now has {now}"
        raise ArgumentError(
            f"the optimizer's groups have been changed since training was set up: it had {len(before)} of {counts}. "
            f"A checkpoint of it could not be resumed. Give the optimizer all groups before: what is to be trained "
            f"later only is frozen until then (`requires_grad_(False)`, and then `True`)."
        )


def check_gradient_hooks(by_name: Mapping[str, Tensor]) -> None:
    """Raise ArgumentError for what is called where the gradient of an update is not complete."""
    for name, one in by_name.items():
        if place := accumulation_hook(one):
            raise ArgumentError(
                f"`{name}` has a hook of `{place}` that is called whenever its gradient was added to "
                f"(`register_post_accumulate_grad_hook`), as optimizers have that step in the backward: that is after "
                f"each micro-batch, so it gets parts of the update's gradient. Let the optimizer step in `step`, look "
                f"at gradients in a `Hook`'s `before_step`, or change those of each micro-batch by `register_hook`."
            )
        if type(one.data) is not Tensor and has_gradient_hooks(one):
            raise ArgumentError(
                f"`{name}` has a hook (`register_hook`), which its shards would not call: gradients are of what is "
                f"gathered from them. Take it away and change the gradient in the forward "
                f"(`torch.autograd.Function`), or share by 'ddp' or 'zero1'."
            )


def _places(model: nn.Module) -> list[Collection[object]]:
    """Where the model's modules and parameters stand: views that show what stands there at any time."""
    return [held.values() for module in model.modules() for held in (children_of(module), parameters_of(module))]
