"""Optimizers as users write them: each does one thing that torch's own do not."""

# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def having(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], Tensor, Tensor]]:
    """Each parameter that has a gradient, between its group and that gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad


class UnsaidLion(Optimizer):
    """Steps by the sign of a momentum (Chen et al., 2023); says nothing about itself."""

    def __init__(self, params: Any, lr: Any = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in having(self):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            parameter.sub_(group["lr"] * (0.9 * state["momentum"] + 0.1 * gradient).sign())
            state["momentum"].lerp_(gradient, 0.01)


class Lion(UnsaidLion):
    elementwise = True


class ScheduleFree(Optimizer):
    """SGD that trains y and evaluates x (Defazio et al., 2024), with the interface of `schedulefree`."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def _move(self, training: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))
                group["train_mode"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer was not in train mode when step was called")
            group["k"] += 1
        for group, parameter, gradient in having(self):
            state, share = self.state[parameter], 1 / group["k"]
            if "z" not in state:
                state["z"] = parameter.clone()
            parameter.lerp_(state["z"], share)
            parameter.add_(gradient, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
            state["z"].sub_(gradient, alpha=group["lr"])


class Lookahead(Optimizer):
    """Every second step goes half of the way from where it was (Zhang et al., 2019); all of it is in its state."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
        for group, parameter, gradient in having(self):
            state = self.state[parameter]
            if not state:
                state["slow"] = parameter.clone()
            parameter.sub_(gradient, alpha=group["lr"])
            if group["taken"] % 2 == 0:
                state["slow"].lerp_(parameter, 0.5)
                parameter.copy_(state["slow"])


class StateInLists(Optimizer):
    """Steps by the mean of the last two gradients, kept in a list, with a name and a nested dict beside it."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in having(self):
            state = self.state[parameter]
            last = [*state.get("last", []), gradient.clone()][-2:]
            inner = state.get("inner", {"count": 0, "pair": (torch.zeros((), dtype=torch.float64), "a name")})
            count = inner["pair"][0] + 1
            state.update(last=last, kind="mean", inner={"count": inner["count"] + 1, "pair": (count, "a name")})
            parameter.sub_(sum(last) / len(last), alpha=group["lr"])


class StateFromConstructor(Optimizer):
    """Makes its state when it is built, as Adagrad does."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient in having(self):
            total = self.state[parameter]["sum"]
            total.addcmul_(gradient, gradient)
            parameter.sub_(group["lr"] * gradient / total.sqrt())


class TensorRate(Optimizer):
    """Has its learning rate as a tensor, and one multiplier more that it changes itself."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": torch.tensor(lr), "decay": torch.ones((), dtype=torch.float64)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["decay"].mul_(0.9)
        for group, parameter, gradient in having(self):
            parameter.sub_(gradient, alpha=float(group["lr"]) * float(group["decay"]))


class Foreach(Optimizer):
    """Does the work of all parameters in one call of a multi-tensor kernel."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            if ready:
                torch._foreach_add_(ready, [parameter.grad for parameter in ready], alpha=-group["lr"])


class OwnReferences(torch.optim.SGD):
    """Lookahead that holds its parameters, their slow copies and a count in attributes of its own."""

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, **more)
        self.taken = 0
        self.slow = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.taken += 1
        if self.taken % 2 == 0:
            for parameter, slow in self.slow:
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class OwnReferencesTold(OwnReferences):
    """The same, with a `state_dict` that holds what it keeps aside."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "taken": self.taken, "slow": [slow.clone() for _, slow in self.slow]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.taken = state_dict["taken"]
        for (_, slow), value in zip(self.slow, state_dict["slow"], strict=True):
            slow.copy_(value)


class GlobalNorm(Optimizer):
    """Divides all gradients by the norm of them all, as Prodigy and D-Adaptation look at all parameters at once."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = sum(float(gradient.square().sum()) for _, _, gradient in having(self)) ** 0.5
        for group, parameter, gradient in having(self):
            parameter.sub_(gradient, alpha=group["lr"] / norm)
        self.state["all"] = {"norm": norm, "steps": self.state.get("all", {}).get("steps", 0) + 1}


class NeedsClosure(torch.optim.SGD):
    """Evaluates the loss twice, as sharpness-aware minimisation does."""

    def step(self, closure: Callable[[], Any]) -> None:
        closure()
        super().step()


class SubclassOfSgd(torch.optim.SGD):
    """Adds nothing to SGD; but who knows?"""
