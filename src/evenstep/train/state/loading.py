"""Loads trained weights into a model before its training, whole or in part. `Trainer.resume` continues a run."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import final

from torch import Tensor, nn

from evenstep.arguments import advice, first_of
from evenstep.checkpoint import on_all_ranks
from evenstep.checkpoint.weights import StoredWeights, open_weights
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.internals import unwrapped
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.tensors import plain

_DOT = re.compile(r"\.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """Report of `load_weights`, by the names of the model or of the file; other tensors stay as they are.

    Args:
        source: the file or checkpoint.
        missing: tensors of the model that the file lacks.
        unexpected: tensors of the file that the model lacks.
        other_shape: tensors of different shapes, as (file's, model's).
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def described(self) -> list[str]:
        """The report, a line for each kind."""
        return [f"weights     {len(self.loaded)} tensors from {self.source}", *self.faults()]

    def faults(self) -> list[str]:
        """Texts on tensors that do not fit."""
        shapes = [f"{name} of shape {[*file]} instead of {[*own]}" for name, (file, own) in self.other_shape.items()]
        kinds = {"missing in the file": self.missing, "not known to the model": self.unexpected, "": shapes}
        return [f"{first_of(names)} {what}".rstrip() for what, names in kinds.items() if names]


def load_weights(
    model: nn.Module,
    path: Path | str | StoredWeights,
    *,
    only: str | Sequence[str] = ("*",),
    average: bool = False,
    partial: bool = False,
) -> LoadedWeights:
    """Load weights into `model`, before its optimizer and its trainer are built, and report them.

    A model in stages loads its stages' part of the file, all ranks of the pipeline together. Prefixes of wrappers
    (`module.`, `_orig_mod.`, FSDP's) are left out of the file's names.

    Args:
        path: a run folder (whose newest checkpoint is taken), a checkpoint or an average of several; a `.safetensors`
            file, an index of several, or a folder with one of these; or a file of `torch.save`.
        only: patterns of the model's names, in which `*` stands for any characters; other tensors stay as they are.
        average: whether to take the average that a run has kept of its parameters.
        partial: whether to load a file in part that lacks tensors, has more, or has other shapes.

    >>> import tempfile, torch
    >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(first.state_dict(), f"{folder}/first.pt")
    ...     load_weights(second, f"{folder}/first.pt", only="weight").loaded
    ('weight',)
    """
    patterns = (only,) if isinstance(only, str) else tuple(only)
    ranks, whole = pipeline_of(model), unwrapped(model)
    state = {plain(name): one for name, one in whole.state_dict(keep_vars=True).items()}
    live = {name: one for name, one in state.items() if isinstance(one, Tensor)}
    tied = {name: tuple(tie) for tie in model.ties for name in tie} if isinstance(model, PipelineModel) else {}
    names = {name: tied.get(name, (name,)) for name in live}
    known = {name for theirs in ranks.gather(list(chain.from_iterable(names.values()))) for name in theirs}
    meant = _meant(patterns, known)
    wanted = {name: [one for one in own if one in meant] for name, own in names.items() if meant & {*own}}

    def compared() -> tuple[StoredWeights, LoadedWeights]:
        opened = open_weights(path, average=average)
        weights = opened.behind(_prefix(opened, meant))
        there = weights.outlines
        places = {name: _place(weights, name, own) for name, own in wanted.items()}
        found = {name: there[place] for name, place in places.items() if place in there}
        loaded = [name for name in found if found[name].shape == live[name].shape]
        held = {id(live[name]) for name in loaded}  # a file may hold tied weights under one of their names
        report = LoadedWeights(
            source=weights.source,
            loaded=tuple(loaded),
            missing=tuple(name for name in wanted if name not in found and id(live[name]) not in held),
            unexpected=tuple(name for name in there if name not in known) if "*" in patterns else (),
            other_shape={
                name: (tuple(found[name].shape), tuple(live[name].shape)) for name in found if name not in loaded
            },
        )
        if report.faults() and not partial:
            raise CheckpointError(
                f"the weights in `{weights.source}` do not fit {type(whole).__name__}: "
                f"{'; '.join(report.faults())}. Name the part by `only`, or load what fits by `partial`."
            )
        return weights, report

    weights, report = on_all_ranks(ranks, compared)
    if not any(ranks.gather(len(report.loaded))):
        raise CheckpointError(f"nothing in `{weights.source}` fits the model; it has {first_of([*weights.outlines])}.")

    def read() -> dict[str, Tensor]:
        values = {name: weights.read(_place(weights, name, wanted[name])) for name in report.loaded}
        weights.verify()
        return values

    values = on_all_ranks(ranks, read)
    own = {plain(name): name for name in whole.state_dict()}
    whole.load_state_dict({own[name]: value for name, value in values.items()}, strict=False)
    return report


def _meant(patterns: Sequence[str], known: set[str]) -> set[str]:
    meant: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in known if fnmatchcase(name, pattern)}
        if not fitting:
            close = advice(pattern, sorted(known), f"it has {first_of(sorted(known))}.")
            raise ArgumentError(f"`only` has `{pattern}`, which fits nothing of the model; {close}", field="only")
        meant |= fitting
    return meant


def _prefix(weights: StoredWeights, meant: set[str]) -> str:
    there = weights.outlines
    if not meant.isdisjoint(there):
        return ""
    times = Counter(name[: dot.end()] for name in there for dot in _DOT.finditer(name) if name[dot.end() :] in meant)
    found = [prefix for prefix, number in times.items() if number == max(times.values())]
    if len(found) > 1:
        raise CheckpointError(f"`{weights.source}` has the model's names behind each of {first_of(found)}; save one.")
    return found[0] if found else ""


def _place(weights: StoredWeights, name: str, names: Sequence[str]) -> str:
    own = [name] if name in names else []
    return next((one for one in (*own, *names) if one in weights.outlines), names[0])
