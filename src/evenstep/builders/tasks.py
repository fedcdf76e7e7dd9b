"""The tasks of a run, their mixture, and how they are weighed, from their tables.

A run of one task has none of this.
"""

from evenstep.builders.schedule import build_schedule
from evenstep.config.schema import Config, MixtureTable
from evenstep.contrib.multitask import COMBINES, Scheduled, Uncertainty
from evenstep.data import AllTasks, Data, Mixing, Mixture, RoundRobin, Sampled
from evenstep.lazy import load
from evenstep.train import Coefficients, Combine, Fixed


def build_mixture(config: Config, data: dict[str, Data]) -> Mixture:
    """The training data of all tasks, mixed."""
    end = (config.mixture or MixtureTable.empty()).end
    return Mixture(data, mixing=build_mixing(config), end=end)


def build_mixing(config: Config) -> Mixing:
    mixture = config.mixture or MixtureTable.empty()
    if mixture.kind == "sampled":
        given = {name: task.sampling_weight for name, task in config.tasks.items()}
        weights = {name: weight for name, weight in given.items() if weight is not None}
        return Sampled(temperature=mixture.temperature, weights=weights, draws=mixture.draws)
    repeats = {name: task.repeats for name, task in config.tasks.items() if task.repeats != 1}
    return RoundRobin(repeats=repeats) if mixture.kind == "round_robin" else AllTasks(repeats=repeats)


def build_coefficients(config: Config) -> Coefficients | None:
    if not config.tasks:
        return None
    if config.coefficients is not None and config.coefficients.kind == "uncertainty":
        return Uncertainty(regression=config.coefficients.regression)
    values = {name: task.coefficient for name, task in config.tasks.items()}
    schedules = {
        name: build_schedule(task.coefficient_schedule)
        for name, task in config.tasks.items()
        if task.coefficient_schedule is not None
    }
    return Scheduled(schedules, values=values) if schedules else Fixed(values)


def build_combine(config: Config) -> Combine | None:
    if config.combine is None:
        return None
    more = {"alpha", "coefficient_lr", "parameters"} if config.combine.kind == "grad_norm" else set[str]()
    return load(COMBINES[config.combine.kind])(**config.combine.model_dump(include=more))
