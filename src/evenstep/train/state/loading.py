"""Puts weights that something else has trained into a model, before it is trained: whole, or in part and said so.

    θ[name] ← file[name]        for the names that fit a pattern; what stays as it is initialised is said

Where anything is missing, unexpected or of another shape, nothing is loaded, unless a part is asked for. Only values
are taken: no optimizer, no counters. To go on with a run is `Trainer.resume`.
"""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import advice, first_of, format_name, require_flag, require_object, said
from evenstep.checkpoint import on_all_ranks
from evenstep.checkpoint.weights import StoredWeights, open_weights
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.internals import unwrapped
from evenstep.names import named_parameters, plain
from evenstep.pipeline import PipelineModel, pipeline_of

_DOT = re.compile(r"\.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What was loaded into a model, and what was not; all by the names of the model or of the file.

    Args:
        source: where it came from.
        loaded: what was loaded.
        missing: what the model has and the file has not, which stays as it is initialised.
        unexpected: what the file has and the model has not.
        other_shape: what both have in different shapes, which stays as it is initialised: the file's, the model's.
        other_format: what was converted to the model's number format: the file's.
        frozen: the parameters among the loaded that are not to be trained.
        trained_by: the optimizer for which these are parameters to train; the run that it is of has evaluated others.
        not_finite: parameters among the loaded that hold NaN or inf, and buffers that hold NaN (inf may be a mask).
        behind: what stands in the file before the names that were looked for, such as "module.".
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    other_format: Mapping[str, str]
    frozen: tuple[str, ...] = ()
    trained_by: str = ""
    not_finite: tuple[str, ...] = ()
    behind: str = ""

    def described(self) -> list[str]:
        """The report, a line for each kind."""
        formats = sorted(set(self.other_format.values()))
        lines = [
            f"weights     {len(self.loaded)} tensors from {self.source}"
            + (f", where their names begin with `{self.behind}`" if self.behind else "")
            + (f", {len(self.other_format)} of them converted from {' and '.join(formats)}" if formats else "")
        ]
        lines += [f"missing     {first_of(self.missing)}: as initialised"] if self.missing else []
        lines += [f"unexpected  {first_of(self.unexpected)}: not taken"] if self.unexpected else []
        lines += [f"other shape {first_of(self._shapes())}: as initialised"] if self.other_shape else []
        lines += [f"trained by  {self.trained_by}, which evaluates others"] if self.trained_by else []
        lines += [f"not finite  {first_of(self.not_finite)}: as in the file"] if self.not_finite else []
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
    if report.not_finite:
        warnings.warn(
            f"`{report.source}` holds NaN or inf in {first_of(report.not_finite)}, and they were loaded as they "
            f"are: updates can't be made with such parameters. Take an earlier checkpoint, or name others by `only`.",
            stacklevel=3,  # through the wrapper that answers calls which do not fit
        )
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
    """The same, but what is to be frozen is only named: for who freezes when optimizer and trainer are built.

    So the optimizer holds it, and a hook may unfreeze it; and a run that goes on needs the file no more.
    """
    require_object("model", model, nn.Module, "`model=Net(…)`")
    _check_whole(model)
    patterns = _patterns(only)
    for name, flag in (("average", average), ("partial", partial), ("freeze", freeze)):
        require_flag(name, flag)
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
                f"{'; '.join(report.faults())}.{_part_meant(weights, known)} Build the model that they were saved "
                f"from, name what is meant by `only`, or let what fits be loaded by `partial`."
            )
        return weights, report

    weights, report = on_all_ranks(ranks, compared)
    if not any(ranks.gather(len(report.loaded))):
        raise CheckpointError(
            f"nothing in `{weights.source}` fits the model: of {first_of(list(weights.outlines))} it has none in "
            f"these shapes; rename what the file holds, or the parts of the model."
        )

    def read() -> dict[str, Tensor]:
        values = {name: weights.read(_place(weights, name, names[name])) for name in report.loaded}
        _check_tied(weights, values, wanted, names)
        weights.verify()
        return values

    values = on_all_ranks(ranks, read)
    parameters = named_parameters(unwrapped(model))
    bad = [name for name, value in values.items() if _is_not_finite(value, is_parameter=name in parameters)]
    report = replace(report, not_finite=tuple(bad))
    own = {plain(name): name for name in unwrapped(model).state_dict()}
    unwrapped(model).load_state_dict({own[name]: value for name, value in values.items()}, strict=False)
    return report


def _is_not_finite(value: Tensor, *, is_parameter: bool) -> bool:
    """Whether there is NaN in a tensor or, of a parameter, inf."""
    if not (value.is_floating_point() or value.is_complex()):
        return False
    known = value if value.itemsize > 1 else value.float()  # kernels know little of formats of 8 bits
    return bool((~known.isfinite() if is_parameter else known.isnan()).any())


def _check_whole(model: nn.Module) -> None:
    """Raise ArgumentError for a model that ranks have cut up, as a trainer does."""
    for name, parameter in model.named_parameters():
        if type(parameter.data) is not Tensor:
            raise ArgumentError(
                f"`model` must be loaded into before a trainer or an engine is built, but `{name}` is cut over ranks "
                f"already; load, then build the optimizer and the trainer. To go on with a run, `trainer.resume(…)`."
            )


def _patterns(only: object) -> tuple[str, ...]:
    patterns = (only,) if isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(one, str) and one for one in patterns):
        given = repr([*only]) if isinstance(only, list | tuple) else said(only)
        raise ArgumentError(
            f'`only` must be patterns of names, such as ["encoder.*", "embed.weight"], but is {given}; leave it out '
            f"where all is meant."
        )
    return tuple(cast("Sequence[str]", patterns))


def _live(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """The tensors of the model's state, and all names of each: with those of its copies in other stages."""
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

    Raises:
        ArgumentError: a pattern that fits none of these.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            meant = advice(pattern, sorted(known), f"it has {first_of(sorted(known))}.")
            raise ArgumentError(f"`only` has `{pattern}`, which nothing of the model fits; {meant}")
    fitting = {
        name: [one for one in own if any(fnmatchcase(one, pattern) for pattern in patterns)]
        for name, own in names.items()
    }
    return {name: own for name, own in fitting.items() if own}


def _prefix(weights: StoredWeights, patterns: Sequence[str], known: set[str]) -> str:
    """What stands in the file before all of its names, or before most of those that are meant, of which it has none.

    torch's DistributedDataParallel puts `module.` before each name, and a module that holds the model what it calls it.

    Args:
        known: the names of the whole model.

    Raises:
        CheckpointError: the same names stand behind several, as those of a teacher and a student do.
    """
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
        raise CheckpointError(
            f"`{weights.source}` has the names of the model behind each of {first_of(found)}; save the weights that "
            f"are meant by themselves, `torch.save(part.state_dict(), …)`."
        )
    return found[0] if found else ""


def _before(names: Iterable[str], ends: Collection[str]) -> Counter[str]:
    """What stands before those names of which the rest, after a dot, is among `ends`, and how often."""
    return Counter(name[: dot.end()] for name in names for dot in _DOT.finditer(name) if name[dot.end() :] in ends)


def _part_meant(weights: StoredWeights, known: set[str]) -> str:
    """Where all names of a file are those of one part of the model, what to do about it; else ""."""
    parts = [prefix for prefix, number in _before(known, weights.outlines).items() if number == len(weights.outlines)]
    if len(parts) != 1 or not known.isdisjoint(weights.outlines):
        return ""
    return f" They are those of its part `{parts[0][:-1]}`: in a script `load_weights(model.{parts[0][:-1]}, …)`."


def _place(weights: StoredWeights, name: str, names: Sequence[str]) -> str:
    """The name in the file of what the model calls `name`, which may be any of `names`."""
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
    """What would be loaded; `known` are the names that the whole model has, or None if only some are wanted."""
    there = weights.outlines
    places = {name: _place(weights, name, names[name]) for name in wanted}
    found = {name: there[place] for name, place in places.items() if place in there}
    loaded = [name for name in found if found[name].shape == wanted[name].shape]
    _check_formats(weights.source, {name: (found[name], wanted[name]) for name in loaded})
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
        other_format={
            name: format_name(found[name].dtype) for name in loaded if found[name].dtype != wanted[name].dtype
        },
        frozen=tuple(sorted({parameters[one] for one in tied if one in parameters})) if freeze else (),
        trained_by=weights.trained_by,
    )


def _check_formats(source: str, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise CheckpointError for values that mean something else in the model's format: (theirs, ours) by name."""
    for name, (there, own) in tensors.items():
        if there.layout != torch.strided:
            raise CheckpointError(
                f"`{name}` in `{source}` is sparse ({there.layout}), but the model's is not; save it as `to_dense()`, "
                f"or name what else is meant by `only`."
            )
        theirs, ours = there.dtype, own.dtype
        if theirs.is_complex > ours.is_complex or (ours.is_floating_point and not theirs.is_floating_point):
            what = "their imaginary parts would be lost" if theirs.is_complex else "they may be quantised, with a scale"
            raise CheckpointError(
                f"`{name}` in `{source}` holds {format_name(theirs)} numbers for a parameter of "
                f"{format_name(ours)}: {what}. Save it in a floating format, or name what else is meant "
                f"by `only`."
            )


def _check_tied(
    weights: StoredWeights,
    values: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    names: Mapping[str, Sequence[str]],
) -> None:
    """Raise CheckpointError where the file has two different values for one parameter of the model."""
    firsts: dict[int, str] = {}
    for name, value in values.items():
        own, place = firsts.setdefault(id(wanted[name]), name), _place(weights, name, names[name])
        together = [*([] if own in names[name] else [own]), *names[name]]
        for other in together:
            if other == place or other not in weights.outlines:
                continue
            there = values[other] if other in values else weights.read(other)
            if there.shape != value.shape or bool(((there != value) & ~(there.isnan() & value.isnan())).any()):
                first, second = sorted((other, place), key=together.index)
                raise CheckpointError(
                    f"`{first}` and `{second}` are one parameter of the model (tied), but in `{weights.source}` they "
                    f"differ; load into a model that does not tie them, or name one of them by `only`."
                )
