"""Every argument of every public constructor, given what it can't be: refused by name, in one line, when it is built.

What an argument takes is read off its annotation, so one that is added tomorrow is walked as well.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
import evenstep.data
import evenstep.events
import evenstep.optim
import evenstep.optim.schedules
import evenstep.parallel
import evenstep.pipeline.layers
import evenstep.train
from evenstep.errors import EvenstepError

DATA = [(torch.zeros(2), torch.zeros(1))] * 8


class Square(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def run(**more: Any) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"model": model, "task": Square(), "optimizer": optimizer, "device": "cpu", **more}


def data(**more: Any) -> dict[str, Any]:
    return {"dataset": DATA, "global_batch_size": 4, **more}


ALONE = evenstep.Group()
BUILT: dict[str, Callable[[], dict[str, Any]]] = {
    "Trainer": lambda: run(data=evenstep.MapData(**data()), updates=1),
    "Engine": run,
    "EarlyStop": lambda: {"patience_evaluations": 2},
    "Evaluate": lambda: {"every_updates": 2},
    "Save": lambda: {"every_updates": 2},
    "StopBelowLr": lambda: {"lr": 1e-9},
    "Profile": lambda: {"first": 1, "last": 2},
    "TimeBudget": lambda: {"max_minutes": 1},
    "Watchdog": lambda: {"timeout_s": 5},
    "Fixed": lambda: {"values": {"a": 1.0}},
    "Scheduled": lambda: {"schedules": {"a": evenstep.Cosine()}},
    "Wsd": lambda: {"decay_updates": 2},
    "ParameterGroup": lambda: {"patterns": ("a",)},
    "CosineRestarts": lambda: {"period_updates": 4},
    "Triangular": lambda: {"period_updates": 4},
    "Step": lambda: {"every": 2},
    "Multiplicative": lambda: {"factors": (0.5,)},
    "Listed": lambda: {"factors": ((1, 1.0),)},
    "PerGroup": lambda: {"groups": {"0": evenstep.Cosine()}},
    "Ddp": lambda: {"group": ALONE},
    "Fsdp": lambda: {"group": ALONE},
    "OrderedFsdp": lambda: {"group": ALONE},
    "Zero1": lambda: {"replicas": evenstep.Ordered()},
    "Processes": lambda: {"device": "cpu"},
    "Layer": lambda: {"name": "a", "build": nn.Linear(2, 1)},
    "Layers": lambda: {"layers": (evenstep.pipeline.layers.Layer("a", nn.Linear(2, 1)),)},
    "PipelineModel": lambda: {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))},
}
"""What a constructor needs at least."""

NOT_BUILT = {  # bases, what evenstep gives, what each micro-batch makes, and what takes no single arguments
    *("Coefficients", "Combine", "Data", "FailurePolicy", "Group", "Hook", "LrSchedule", "Mixing", "Precision"),
    *(
        "Strategy",
        "Task",
        "Writer",
        "Aborted",
        "Committed",
        "Incident",
        "Prediction",
        "Result",
        "Loss",
        "EvenstepError",
    ),
    *("Collected", "Separate", "Trained", "Progress", "Answer", "MultiOptimizer", "Microbatch", "GlobalBatch", "Part"),
    *("Position", "DataFault", "FoundLr", "LoadedWeights", "TaskWeights"),
}
ALSO = {"values": "coefficients"}  # as whom it is mostly given
OPTIONS = {"Training": "train", "Checkpointing": "checkpoint", "Failures": "failures", "Logging": "log"}
PLACES: list[ModuleType] = [evenstep, evenstep.train, evenstep.optim.schedules, evenstep.pipeline.layers]
SEVERAL = "Sequence|Iterable|Collection|tuple|MapDataset|list"
WRONG: dict[str, tuple[Callable[[], Any], str]] = {  # a value, and the words of annotations that take it
    "an object": (object, "Any"),
    "a class": (lambda: dict, "Any|Callable|Collate|Build"),
    "a function": (lambda: lambda *given: None, "Any|Callable|Collate|Build|Lengths"),
    "a module": (lambda: nn.Linear(1, 1), "Any|Callable|Collate|Build|Module"),
    "a complex number": (lambda: 1j, "Any"),
    "a word": (lambda: "banana", r"Any|\bstr\b(?!,)"),
    "a number": (lambda: -1.5, "Any"),
    "no number": (lambda: math.nan, "Any"),
    "a whole number": (lambda: -3, "Any|seed"),
    "a tensor": (lambda: torch.ones(2), f"Any|{SEVERAL}|Lengths"),
    "a list": (lambda: [1], f"Any|{SEVERAL}"),
    "a table": (lambda: {1: 2}, "Any|config"),
    "a set": (lambda: {"a", "b"}, "Any|Collection|Iterable"),
}


@cache
def constructors() -> dict[str, type]:
    found: dict[str, type] = {}
    for place in PLACES:
        for name in getattr(place, "__all__", ()) or vars(place):
            one = getattr(place, name)
            if (
                isinstance(one, type)
                and one.__module__.startswith("evenstep")
                and ".data." not in one.__module__
                and not inspect.isabstract(one)
            ):
                found[name] = one
    return {name: one for name, one in found.items() if name not in NOT_BUILT and not issubclass(one, Exception)}


def cases() -> list[Any]:
    return [
        pytest.param(name, parameter, id=f"{name}.{parameter.name}")
        for name, one in sorted(constructors().items())
        for parameter in inspect.signature(one).parameters.values()
    ]


def built(name: str, /, **given: Any) -> None:
    needed = BUILT.get(name, dict)()
    one = constructors()[name](**{**needed, **given})
    if name in OPTIONS:  # an option object is taken as a whole
        evenstep.Trainer(**BUILT["Trainer"](), **{OPTIONS[name]: one})


@pytest.mark.parametrize(("name", "parameter"), cases())
def test_what_an_argument_cannot_be_is_refused_by_its_name_when_it_is_built(
    name: str, parameter: inspect.Parameter
) -> None:
    takes, faults = f"{parameter.annotation} {parameter.name}", list[str]()
    for what, (value, words) in WRONG.items():
        if re.search(words, takes):
            continue
        try:
            built(name, **{parameter.name: value()})
        except EvenstepError as error:
            if "\n" in str(error) or ALSO.get(parameter.name, parameter.name) not in str(error):
                faults.append(f"{what}: is answered without its name: {error}")
        except Exception as error:  # noqa: BLE001 - said below
            faults.append(f"{what}: raises {type(error).__name__}: {error}")
        else:
            faults.append(f"{what}: is taken")
    assert not faults, "\n".join([f"`{name}({parameter.name}=…)`", *faults])


@pytest.mark.parametrize("name", sorted(constructors()))
def test_what_the_walk_begins_with_is_right(name: str) -> None:
    if name != "Processes":  # which joins others
        built(name)


@pytest.mark.parametrize("several", [{"a": 1}, {"a": Square}, {1: Square()}, {"a": lambda: None}])
def test_what_is_no_task_among_several_is_refused(several: Mapping[Any, Any]) -> None:
    for kind in (evenstep.Trainer, evenstep.Engine):
        given = BUILT[kind.__name__]()
        with pytest.raises(EvenstepError, match="task"):
            kind(**given | {"task": several})
