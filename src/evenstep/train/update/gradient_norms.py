"""‖g‖₂ over all trained parameters, of whole models and of models in stages."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias, final

import torch
from torch import Tensor

from evenstep.optim.apply import norms
from evenstep.parallel import ParameterLayout, each_norm, squared_norm
from evenstep.pipeline import PipelineModel
from evenstep.tensors import named_parameters


@final
class NormsOfWhole:
    """Norms of a model that each data-parallel rank holds whole, or in shards."""

    def __init__(self, layout: ParameterLayout, parameters: Sequence[Tensor]) -> None:
        self._layout = layout
        self._norms = partial(norms, dtype=_norm_dtype({parameter.dtype for parameter in parameters}))

    def squared(self, gradients: list[Tensor]) -> Tensor | None:
        """‖g‖₂² of all that is trained, alike on all ranks; None where none has a gradient: no task gave a loss."""
        return squared_norm(self._layout, gradients, self._norms) if gradients else None

    def each(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """‖v‖₂ of tensors that ranks hold as they hold the parameters of these names: whole, and alike on all ranks.

        Args:
            values: of this rank, by the name of a parameter; of one that stages share, one of them counts.
        """
        dense = [_dense(value) for value in values.values()]
        wide = _norm_dtype({value.dtype for value in dense})  # parameters of 16 bits are no gradients of their masters
        each = each_norm(self._layout, dense, partial(norms, dtype=wide))
        return dict(zip(values, each.unbind(), strict=True))


@final
class NormsOfStages:
    """Norms of a model in stages: each parameter's has its place in one vector, which all ranks get."""

    def __init__(self, model: PipelineModel, layout: ParameterLayout, names: set[str], device: torch.device) -> None:
        self._layout, self._pipeline = layout, model.mesh.pipeline
        self._slots = slots = {name: slot for slot, name in enumerate(model.parameter_sizes())}
        self._counted = [(slots[n], p) for n, p in named_parameters(model).items() if n in slots and n in names]
        dtypes = {dtype for theirs in self._pipeline.gather({p.dtype for _, p in self._counted}) for dtype in theirs}
        self._dtype = _norm_dtype(dtypes)
        self._known_places: dict[tuple[int, ...], Tensor] = {}  # few: which have a gradient changes seldom
        self._zeros = torch.zeros(len(slots), dtype=self._dtype or next(iter(dtypes), torch.float32), device=device)

    def squared(self, gradients: list[Tensor]) -> Tensor | None:
        """See `NormsOfWhole.squared`: the same sum in the same order on all ranks.

        Parameters without a gradient on any rank are left out, so that the sum is that of a model that is whole.
        """
        present = [(slot, p.grad) for slot, p in self._counted if p.grad is not None]
        anywhere, each = self._each(present, self._dtype)
        if len(anywhere) < len(each):
            each = each.index_select(0, self._places(tuple(anywhere)))
        return each.dot(each) if anywhere else None

    def each(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `NormsOfWhole.each`."""
        known = [(self._slots[name], _dense(value)) for name, value in values.items() if name in self._slots]
        anywhere, each = self._each(known, self._zeros.dtype)  # parameters may be narrower than their gradients
        names = list(self._slots)
        return {names[slot]: each[slot] for slot in anywhere}

    def _each(self, present: list[tuple[int, Tensor]], dtype: torch.dtype | None) -> tuple[list[int], Tensor]:
        each = torch.zeros_like(self._zeros)
        having = {slot for slot, _ in present}
        counts = self._pipeline.sum_floats([float(slot in having) for slot in range(len(each))])
        anywhere = [slot for slot, count in enumerate(counts) if count]
        if present:
            places = self._places(tuple([slot for slot, _ in present]))
            each[places] = each_norm(self._layout, [g for _, g in present], partial(norms, dtype=dtype))
        self._pipeline.sum(each)()
        return anywhere, each

    def _places(self, slots: tuple[int, ...]) -> Tensor:
        if slots not in self._known_places:
            places = torch.tensor(slots, dtype=torch.long)
            self._known_places[slots] = places.to(self._zeros.device, non_blocking=True)
        return self._known_places[slots]


GradientNorms: TypeAlias = NormsOfWhole | NormsOfStages


def _dense(value: Tensor) -> Tensor:
    return value.coalesce().values() if value.is_sparse else value


def _norm_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}:
        return None
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
