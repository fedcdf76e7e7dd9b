"""Loads trained weights into a model before its training, whole or in part. To continue a run is `Trainer.resume`."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from evenstep.tensors import named_parameters, plain

_DOT = re.compile(r"\.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """Report about loaded weights, by the names of the model or of the file.

    Args:
        source: where it came from.
        loaded: what was loaded.
        missing: what the model has and the file has not, which stays as it is initialised.
        unexpected: what the file has and the model has not.
        other_shape: what both have in different shapes, which stays as it is initialised: the file's, the model's.
        frozen: the parameters among the loaded that are not to be trained.
        behind: what stands in the file before the names that were looked for, such as "module.".
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    frozen: tuple[str, ...] = ()
    behind: str = ""

    def described(self) -> list[str]:
        """The report, a line for each kind."""
        lines = [
            f"weights     {len(self.loaded)} tensors from {self.source}"
            + (f", where their names begin with `{self.behind}`" if self.behind else "")
        ]
        lines += [f"missing     {first_of(self.missing)}: as initialised"] if self.missing else []
        lines += [f"unexpected  {first_of(self.unexpected)}: not taken"] if self.unexpected else []
        lines += [f"other shape {first_of(self._shapes())}: as initialised"] if self.other_shape else []
        lines += [f"frozen      {len(self.frozen)} of the loaded parameters"] if self.frozen else []
        return lines

    def faults(self) -> list[str]:
        """What does not fit, in half sentences."""
        return [
            *([f"{first_of(self.missing)} missing in the file"] if self.missing else []),
            *([f"{first_of(self.unexpected)} not known to the model"] if self.unexpected else []),
            *([f"{first_of(self._shapes())}"] if self.other_shape else []),
        ]

    def _shapes(self) -> list[str]:
        return [
            f"{name} of shape {[*theirs]} instead of {[*ours]}" for name, (theirs, ours) in self.other_shape.items()
        ]

    def freeze(self, model: nn.Module) -> None:
        """Let the parameters of `frozen` not be trained."""
        for name, parameter in named_parameters(unwrapped(model)).items():
            if name in self.frozen:
                parameter.requires_grad_(False)


def load_weights(
    model: nn.Module,
    path: Path | str | StoredWeights,
    *,
    only: str | Sequence[str] = ("*",),
    average: bool = False,
    partial: bool = False,
    freeze: bool = False,
) -> LoadedWeights:
    """Load weights into `model`, before its optimizer and its trainer are built; gives a report of it.

    On several ranks each loads its own model. A model in stages loads what of the file its stages have, all ranks of
    the pipeline together.

    Args:
        path: a run folder (whose newest checkpoint is taken), a checkpoint or an average of several; a `.safetensors`
            file, an index of several, or a folder with one of these, as the hub has them; or a file of `torch.save`,
            which is read with `weights_only=True`.
        only: patterns of the model's names, in which `*` stands for any characters: what fits none stays as it is.
        average: whether to take the average that a run has kept of its parameters.
        partial: whether a file that lacks something, has more, or has other shapes may be loaded in part.
        freeze: whether what was loaded is not to be trained.

    Raises:
        ArgumentError: a pattern that nothing of the model fits.
        CheckpointError: no weights there, or none that fit; nothing has been changed then.

    >>> import tempfile, torch
    >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(first.state_dict(), f"{folder}/first.pt")
    ...     load_weights(second, f"{folder}/first.pt", only="weight").loaded
    ('weight',)
    >>> torch.equal(first.weight, second.weight), torch.equal(first.bias, second.bias)
    (True, False)
    """
    report = put_weights(model, path, only=only, average=average, partial=partial, freeze=freeze)
    report.freeze(model)
    return report


def put_weights(
    model: nn.Module,
    path: Path | str | StoredWeights,
    *,
    only: str | Sequence[str] = ("*",),
    average: bool = False,
    partial: bool = False,
    freeze: bool = False,
) -> LoadedWeights:
    """`load_weights`, but parameters to freeze are only named in the report.

    So the optimizer holds it, and a hook may unfreeze it; and a run that goes on needs the file no more.
    """
    patterns = (only,) if isinstance(only, str) else tuple(only)
    ranks = pipeline_of(model)
    live, names = _live(model)
    known = {name for theirs in ranks.gather(list(chain.from_iterable(names.values()))) for name in theirs}
    names = _fitting(patterns, names, known)
    wanted = {name: live[name] for name in names}

    def compared() -> tuple[StoredWeights, LoadedWeights]:
        weights = open_weights(path, average=average)
        behind = _prefix(weights, patterns, known)
        weights = weights.behind(behind)
        report = _compare(weights, model, wanted, names, known if "*" in patterns else None, freeze=freeze)
        report = replace(report, behind=behind)
        if report.faults() and not partial:
            raise CheckpointError(
                f"the weights in `{weights.source}` are not those of {type(unwrapped(model)).__name__}: "
                f"{'; '.join(report.faults())}. Name the part by `only`, or load what fits by `partial`."
            )
        return weights, report

    weights, report = on_all_ranks(ranks, compared)
    if not any(ranks.gather(len(report.loaded))):
        raise CheckpointError(f"nothing in `{weights.source}` fits the model; it has {first_of([*weights.outlines])}.")

    def read() -> dict[str, Tensor]:
        values = {name: weights.read(_place(weights, name, names[name])) for name in report.loaded}
        weights.verify()
        return values

    values = on_all_ranks(ranks, read)
    own = {plain(name): name for name in unwrapped(model).state_dict()}
    unwrapped(model).load_state_dict({own[name]: value for name, value in values.items()}, strict=False)
    return report


def _live(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    state = unwrapped(model).state_dict(keep_vars=True)
    live = {plain(name): one for name, one in state.items() if isinstance(one, Tensor)}
    tied = {name: tie.names for tie in model.ties for name in tie.names} if isinstance(model, PipelineModel) else {}
    return live, {name: [*tied.get(name, (name,))] for name in live}


def _fitting(patterns: Sequence[str], names: Mapping[str, Sequence[str]], known: set[str]) -> dict[str, list[str]]:
    """The names that a pattern fits, of each tensor that has one.

    Copies of one parameter in several stages are meant by each of its names, as the one of a whole model is.

    Args:
        names: all of each tensor of this rank.
        known: those of the whole model.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            meant = advice(pattern, sorted(known), f"it has {first_of(sorted(known))}.")
            raise ArgumentError(f"`only` has `{pattern}`, which nothing of the model fits; {meant}", field="only")
    fitting = {
        name: [one for one in own if any(fnmatchcase(one, pattern) for pattern in patterns)]
        for name, own in names.items()
    }
    return {name: own for name, own in fitting.items() if own}


def _prefix(weights: StoredWeights, patterns: Sequence[str], known: set[str]) -> str:
    meant = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not meant.isdisjoint(weights.outlines):
        return ""
    times = _before(weights.outlines, meant)
    most = max(times.values(), default=0)
    found = [
        prefix
        for prefix, number in times.items()
        if number == most and (2 * most > len(meant) or all(name.startswith(prefix) for name in weights.outlines))
    ]
    if len(found) > 1:
        raise CheckpointError(f"`{weights.source}` has the model's names behind each of {first_of(found)}; save one.")
    return found[0] if found else ""


def _before(names: Iterable[str], ends: Collection[str]) -> Counter[str]:
    return Counter(name[: dot.end()] for name in names for dot in _DOT.finditer(name) if name[dot.end() :] in ends)


def _place(weights: StoredWeights, name: str, names: Sequence[str]) -> str:
    own = [name] if name in names else []
    return next((one for one in (*own, *names) if one in weights.outlines), names[0])


def _compare(
    weights: StoredWeights,
    model: nn.Module,
    wanted: Mapping[str, Tensor],
    names: Mapping[str, Sequence[str]],
    known: set[str] | None,
    *,
    freeze: bool,
) -> LoadedWeights:
    there = weights.outlines
    places = {name: _place(weights, name, names[name]) for name in wanted}
    found = {name: there[place] for name, place in places.items() if place in there}
    loaded = [name for name in found if found[name].shape == wanted[name].shape]
    tied = {id(wanted[name]) for name in loaded}  # a file may hold tied weights under one of their names
    parameters = {id(one): name for name, one in named_parameters(unwrapped(model)).items()}
    return LoadedWeights(
        source=weights.source,
        loaded=tuple(loaded),
        missing=tuple(name for name, one in wanted.items() if name not in found and id(one) not in tied),
        unexpected=() if known is None else tuple(name for name in there if name not in known),
        other_shape={
            name: (tuple(found[name].shape), tuple(wanted[name].shape)) for name in found if name not in loaded
        },
        frozen=tuple(sorted({parameters[one] for one in tied if one in parameters})) if freeze else (),
    )
