"""Training several tasks by more than a sum: methods for their gradients, learned and scheduled coefficients."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.internals import local_tensor
from evenstep.keys import key
from evenstep.optim.schedules import AnySchedule
from evenstep.schema import NonNegative, Positive
from evenstep.train.tasks.weighting import Coefficients, Combine, Separate, TaskWeights, check_tasks
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import TrainContext
from evenstep.train.update.outcome import Passes
from evenstep.train.update.weigh import Weights

COMBINES = {
    "separate": "evenstep.train.tasks.weighting:Separate",
    "pc_grad": "evenstep.contrib.multitask:PcGrad",
    "aligned_mtl": "evenstep.contrib.multitask:AlignedMtl",
    "grad_norm": "evenstep.contrib.multitask:GradNorm",
}
"""Classes by the words of `combine`, as "module:name"."""

COEFFICIENTS = {
    "scheduled": "evenstep.contrib.multitask:Scheduled",
    "uncertainty": "evenstep.contrib.multitask:Uncertainty",
}
"""Classes by the words of `coefficients`, as "module:name"."""

Accumulate = Callable[[Weights, int], Passes]


@final
class PcGrad(Combine):
    """Projects conflicting gradients (Yu et al., 2020, https://arxiv.org/abs/2001.06782, algorithm 1).

        g_i' ← g_i;  for every other task j, if ⟨g_i', g_j⟩ < 0:  g_i' ← g_i' - ⟨g_i', g_j⟩ / ‖g_j‖² · g_j
        g = Σ_i g_i'

    The order is keyed by (seed, u, i), so it is the same on all ranks and after a resume.

    >>> gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    >>> shares = PcGrad()(gradients @ gradients.T, [1.0, 1.0], tasks=["a", "b"], seed=1, update=1)
    >>> (torch.tensor(shares.shared, dtype=torch.float64) @ gradients).tolist()
    [0.5, 1.5]
    """

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        inner: list[list[float]] = products.tolist()
        count = len(tasks)
        shares = [0.0] * count
        for i in range(count):
            projected = [float(k == i) for k in range(count)]  # g_i' = Σ_k projected_k · g_k
            others = sorted((j for j in range(count) if j != i), key=lambda j, i=i: key(seed, "pcgrad", update, i, j))
            for j in others:
                along = sum(share * row[j] for share, row in zip(projected, inner, strict=True))
                if along < 0:
                    projected[j] -= along / inner[j][j]
            shares = [total + share for total, share in zip(shares, projected, strict=True)]
        return TaskWeights(shared=shares, own=[1.0] * count)


@final
class AlignedMtl(Combine):
    """Sums gradients made orthogonal and equally long (Senushkin et al., 2023, https://arxiv.org/abs/2305.19000).

    With G the matrix of gradients [N, T], M = GᵀG = V · diag(μ) · Vᵀ and μ_min the smallest eigenvalue above zero,

        α = √μ_min · V · diag(μ^(-½)) · Vᵀ · 1,   g = G · α          over the eigenvalues above zero

    >>> gradients = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> shares = AlignedMtl()(gradients @ gradients.T, [1.0, 1.0], tasks=["a", "b"], seed=1, update=1)
    >>> shares.shared
    [0.25, 1.0]
    """

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        count = len(tasks)
        values, vectors = torch.linalg.eigh(products)
        kept = values > 1e-12 * values[-1].clamp(min=0.0)  # others are roundings of zero
        own = [1.0] * count
        if not bool(kept.any()):
            return TaskWeights(shared=own, own=own)
        values, vectors = values[kept], vectors[:, kept]
        balance = values[0].sqrt() * (vectors / values.sqrt()) @ vectors.T
        return TaskWeights(shared=balance.sum(1).tolist(), own=own)


@final
class GradNorm(Combine):
    """Coefficients from gradient norms (Chen et al., 2018, https://arxiv.org/abs/1711.02257, algorithm 1).

    With G_t = λ_t · ‖∇L_t‖, Ḡ their mean and r_t = (L_t / L_t(first)) / mean of those, after each update

        λ_t ← λ_t - η · sign(G_t - Ḡ · r_t^α) · ‖∇L_t‖,  then scaled so that the λ_t keep their sum

    Args:
        alpha: α, how strongly slow tasks are favoured; 0 makes all gradients equally long.
        coefficient_lr: η, how fast the coefficients move.
        parameters: patterns of names of the shared parameters whose gradients are measured.

    >>> method = GradNorm(coefficient_lr=0.1)
    >>> _ = method.build(("a", "b"))
    >>> products = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> for update in (1, 2):
    ...     shares = method(products, [1.0, 1.0], tasks=("a", "b"), seed=1, update=update)
    >>> [round(share, 3) for share in shares.shared]
    [0.842, 1.158]
    """

    def __init__(
        self, *, alpha: NonNegative = 1.5, coefficient_lr: Positive = 0.025, parameters: Sequence[str] = ("*",)
    ) -> None:
        self._alpha = alpha
        self._coefficient_lr = coefficient_lr
        self._parameters = tuple(parameters)
        self._tasks: tuple[str, ...] = ()
        self._learned = nn.Identity()

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        self._tasks = tuple(tasks)
        self._learned = nn.Identity()  # as a model that runs all of its parts runs this as well
        self._learned.register_buffer("coefficients", torch.ones(len(tasks)))  # λ_t; buffers go into checkpoints
        self._learned.register_buffer("first_losses", torch.zeros(len(tasks)))  # 0 before it comes
        return self._learned

    def looks_at(self, parameter: str) -> bool:
        return any(fnmatchcase(parameter, pattern) for pattern in self._parameters)

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        places = [self._tasks.index(name) for name in tasks]
        coefficients, first_losses = (self._learned.get_buffer(name) for name in ("coefficients", "first_losses"))
        now = coefficients[places].tolist()
        first = [before or loss for before, loss in zip(first_losses[places].tolist(), losses, strict=True)]
        moved = self._moved(now, products.diagonal().sqrt().tolist(), losses, first)
        with torch.no_grad():
            first_losses[places] = torch.tensor(first).to(first_losses.dtype)
            coefficients[places] = torch.tensor(moved).to(coefficients.dtype)
        return TaskWeights(shared=now, own=now)

    def _moved(
        self, now: list[float], norms: list[float], losses: Sequence[float], first: Sequence[float]
    ) -> list[float]:
        count = len(now)
        lengths = [share * norm for share, norm in zip(now, norms, strict=True)]
        mean = sum(lengths) / count
        paces = [loss / begin if begin > 0 and loss >= 0 else 1.0 for loss, begin in zip(losses, first, strict=True)]
        mean_pace = sum(paces) / count or 1.0
        # a tensor's power is infinite where a number's raises OverflowError
        powers = torch.tensor([pace / mean_pace for pace in paces], dtype=torch.float64).pow(self._alpha).tolist()
        targets = [mean * power for power in powers]
        lr = self._coefficient_lr
        raw = [
            max(share - lr * (math.copysign(1.0, length - target) if length != target else 0.0) * norm, 1e-3)
            for share, length, target, norm in zip(now, lengths, targets, norms, strict=True)
        ]
        return [value * sum(now) / sum(raw) for value in raw]


@final
class Uncertainty(Coefficients):
    """Coefficients learned with the model (Kendall, Gal, Cipolla, 2018, https://arxiv.org/abs/1705.07115, eq. 7 to 10).

    With s_t = log σ_t² a parameter of each task, and κ_t = 1 (classification) or ½ (regression), the loss is

        Σ_t κ_t · exp(-s_t) · L_t + s_t / 2

    A task without work leaves its s_t as it is.

    Args:
        regression: the tasks whose loss is a squared error; all others are taken for likelihoods.

    >>> coefficients = Uncertainty(regression=("box",))
    >>> module = coefficients.build(("class", "box"))
    >>> coefficients.weighted("box", torch.tensor(4.0), 1.0).item()
    2.0
    """

    are_learned = True

    def __init__(self, *, regression: Sequence[str] = ()) -> None:
        super().__init__()
        self._regression = frozenset(regression)
        self._log_variances = nn.Identity()

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        check_tasks(dict.fromkeys(self._regression, None), tasks)
        self._log_variances = nn.Identity()  # as a model that runs all of its parts runs this as well
        for name in tasks:  # one 0-dim parameter each, so that those without work have no gradient
            self._log_variances.register_parameter(f"log_variance_{name}", nn.Parameter(torch.zeros(())))
        return self._log_variances

    def weighted(self, task: str, loss: Tensor, share: float | Tensor) -> Tensor:
        log_variance = self._log_variances.get_parameter(f"log_variance_{task}")
        kappa = 0.5 if task in self._regression else 1.0
        return kappa * (-log_variance).exp() * loss + 0.5 * share * log_variance


@final
class Scheduled(Coefficients):
    """λ_t(u) = λ_t · schedule_t(u): a number for each task, times a schedule for some.

    Args:
        schedules: by task; a task without one keeps its number.
        values: λ by task; 1 where none is given.

    >>> from evenstep.optim.schedules import Constant
    >>> coefficients = Scheduled({"box": Constant(warmup_updates=4)}, values={"box": 2.0})
    >>> coefficients.check(updates=100)
    >>> [coefficients.value("box", update) for update in (1, 2, 4, 9)]
    [0.5, 1.0, 2.0, 2.0]
    """

    def __init__(self, schedules: Mapping[str, AnySchedule], *, values: Mapping[str, Positive] | None = None) -> None:
        super().__init__(values)
        self._schedules = dict(schedules)
        for name, schedule in self._schedules.items():
            if schedule.needs:
                raise ArgumentError(
                    f"`schedules` of task `{name}` must depend on the number of the update only, but "
                    f"{type(schedule).__name__} follows {', '.join(schedule.needs)}, which only learning rates do."
                )
        self._updates: int | None = None

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        check_tasks(self._schedules, tasks)
        return super().build(tasks)

    def check(self, updates: int | None) -> None:
        for schedule in self._schedules.values():
            schedule.check(updates)
        self._updates = updates

    def value(self, task: str, update: int) -> float:
        schedule = self._schedules.get(task)
        return super().value(task, update) * (1.0 if schedule is None else schedule(update, self._updates))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PerTaskGradients:
    """Leaves in `.grad` what a method makes of the tasks' gradients.

    The plan is run once per task, so a strategy sums each task's gradient over ranks as any other. It costs one
    reduction per task, T copies of the gradients, and one wait of the host per update.

    Args:
        accumulate: leaves the whole gradient of the given micro-batches in `.grad`.
        parameters: those that are trained, by name.
    """

    accumulate: Accumulate
    combine: Combine
    parameters: Mapping[str, nn.Parameter]
    context: TrainContext
    execution: Execution

    def __call__(self, weights: Weights, update: int) -> Passes:
        """Run the update's tasks one after the other, in the run's order, and combine their gradients."""
        tasks = [name for name in self.context.tasks if name in weights.totals]
        gradients: dict[str, list[Tensor | None]] = {}
        late: dict[str, Tensor] = {}
        whole = Passes({}, weights.total)
        for name in tasks:
            one = self.accumulate(weights.of(name), update)
            if isinstance(one.total, Tensor):
                late[name] = one.total
            gradients[name] = _take_gradients(self.parameters, late.get(name))
            whole.losses.update(one.losses)
        if late:
            of_others = math.fsum(weights.totals[name] for name in tasks if name not in late)
            total = torch.stack([*late.values()]).sum() + of_others
            whole = Passes(whole.losses, total, divisor=total > 0)
        names, parameters = list(self.parameters), list(self.parameters.values())
        having = [[name for name in tasks if gradients[name][place] is not None] for place in range(len(names))]
        seen = [place for place, those in enumerate(having) if len(those) > 1 and self.combine.looks_at(names[place])]
        shares = TaskWeights(shared=[1.0] * len(tasks), own=[1.0] * len(tasks))
        if not isinstance(self.combine, Separate):
            products = self._products([[gradients[name][place] for name in tasks] for place in seen], len(tasks))
            losses = self._losses(tasks, weights, whole, late)
            if bool(products.isfinite().all()) and bool(losses.isfinite().all()):  # else the update will be aborted
                shares = self._shares(products, losses.tolist(), tasks, update)
        for place, parameter in enumerate(parameters):
            factors = shares.shared if len(having[place]) > 1 else shares.own
            parameter.grad = _sum_gradients([gradients[name][place] for name in tasks], factors)
        return whole

    def _shares(self, products: Tensor, losses: list[float], tasks: list[str], update: int) -> TaskWeights:
        context = self.context
        with context.randomness.keyed(key(context.seed, "combine", update)):
            return self.combine(products, losses, tasks=tasks, seed=context.seed, update=update)

    def _losses(self, tasks: Sequence[str], weights: Weights, whole: Passes, late: Mapping[str, Tensor]) -> Tensor:
        each = torch.zeros(len(tasks), weights.num_microbatches, dtype=torch.float64)
        for microbatch, (name, loss) in whole.losses.items():
            each[tasks.index(name), microbatch] = loss.double().cpu() / weights.divisors[name]
        summed = self.execution.group.sum_floats(each.flatten().tolist())
        divisors = torch.tensor([float(late.get(name, 1.0)) for name in tasks], dtype=torch.float64)
        of_tasks = torch.tensor(summed, dtype=torch.float64).view_as(each).sum(1)
        return torch.where(divisors > 0, of_tasks / divisors, 0.0)

    def _products(self, columns: list[list[Tensor | None]], count: int) -> Tensor:
        device, layout = self.context.device, self.execution.reducers.layout
        dtype = torch.float32 if device.type == "mps" else torch.float64
        pairs = [(i, j) for i in range(count) for j in range(i + 1)]
        dots: dict[tuple[int, int], list[Tensor]] = {pair: [] for pair in pairs}
        for column in columns:
            local = [None if one is None else layout.full(one).flatten().to(dtype) for one in column]
            for i, j in pairs:
                one, other = local[i], local[j]
                if one is not None and other is not None:
                    dots[i, j].append(torch.dot(one, other))
        products = torch.zeros(count, count, dtype=dtype, device=device)
        for (i, j), some in dots.items():
            if some:
                products[i, j] = products[j, i] = torch.stack(some).sum()
        return products.cpu().double() / self.context.loss_scale.value**2


def _take_gradients(parameters: Mapping[str, nn.Parameter], late_total: Tensor | None) -> list[Tensor | None]:
    """Take the gradients out of `.grad`, divided by a late weight.

    If that is 0 they are None on the CPU, so that the optimizer leaves a head of the task alone. On an accelerator,
    which is not waited for, they are 0, so weight decay and momentum move the head.
    """
    gradients: list[Tensor | None] = [parameter.grad for parameter in parameters.values()]
    if late_total is not None and late_total.device.type == "cpu" and late_total == 0:
        gradients = [None] * len(gradients)
    elif late_total is not None:
        share = torch.where(late_total > 0, 1.0 / late_total, 0.0)
        for gradient in gradients:
            if gradient is not None:
                local_tensor(gradient).mul_(share.to(gradient.dtype))
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def _sum_gradients(gradients: Sequence[Tensor | None], factors: Sequence[float]) -> Tensor | None:
    """Σ factor · gradient in the memory of the first gradient; None without any."""
    total: Tensor | None = None
    for gradient, factor in zip(gradients, factors, strict=True):
        if gradient is not None:
            if factor != 1.0:
                local_tensor(gradient).mul_(factor)
            if total is None:
                total = gradient
            else:
                local_tensor(total).add_(local_tensor(gradient))
    return total
