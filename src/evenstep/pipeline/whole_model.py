"""A model in stages, whole on this rank for a while: its outline, filled with the tensors that all ranks hold.

Layers are sent one after the other, each by the rank that holds it, to the ranks that want the whole model; what a
rank holds itself is put in as it is. It is for what needs a model that answers whenever it is called: evaluations of
tasks by themselves, and what the average gives. Training never uses it.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from evenstep.errors import OutOfMemoryError, TaskError
from evenstep.internals import unwrapped
from evenstep.memory import is_out_of_memory
from evenstep.names import named_tensors
from evenstep.pipeline.outline import LayersInTurn
from evenstep.pipeline.pipeline_model import PipelineModel
from evenstep.pipeline.wire import Address, Wire
from evenstep.strides import shares_memory


class Content(NamedTuple):
    """What a layer holds beside its Python code.

    Args:
        tensors, strides: of its parameters and buffers, by name.
        more: the extra state of its modules, by name.
    """

    tensors: dict[str, Tensor]
    strides: dict[str, tuple[int, ...]]
    more: dict[str, Any]


@final
class WholeModel:
    """The whole of a model of which this rank holds some stages.

    Args:
        wire: over which the others' tensors come.
    """

    def __init__(self, model: PipelineModel, wire: Wire) -> None:
        self._model, self._wire = model, wire

    @property
    def as_given(self) -> nn.Module:
        """The model as `PipelineModel` was given it; `LayersInTurn`, if that were only its layers."""
        return self._modules[0]

    @property
    def in_turn(self) -> LayersInTurn:
        """Its layers, called one after the other."""
        return self._modules[1]

    @cached_property
    def _modules(self) -> tuple[nn.Module, LayersInTurn]:
        return self._model.outline.drawn(self._model.layers)

    def gathered(self, *, ranks: Collection[int], copied: bool = False) -> dict[str, Content]:
        """The contents of all layers by name, on these ranks of the pipeline; on others nothing.

        All ranks of the pipeline call it together, between plans.

        Args:
            copied: whether what this rank holds itself is copied, since it will be changed while it is used.

        Raises:
            OutOfMemoryError: this rank has no room for them.
        """
        try:
            return self._gathered(ranks, copied=copied)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"pipeline rank {self._model.mesh.pipeline.rank} has no memory for the whole model, which is put "
                f"together there for tasks that evaluate by themselves (`Task.evaluate`) or ask its average "
                f"(`now.teacher`). Evaluate checkpoints in a run with more memory, or leave the average to a smaller "
                f"model."
            ) from error

    def _gathered(self, ranks: Collection[int], *, copied: bool) -> dict[str, Content]:
        model, rank, mine = self._model, self._model.mesh.pipeline.rank, self._model.own_layers()
        found: dict[str, Content] = {}
        for place, name in enumerate(layer.name for layer in model.layers.layers):  # in one order on all ranks
            owner = model.rank_of_layer(place)
            if owner == rank:
                content = _content(mine[name])
                for other in ranks:
                    if other != rank:
                        self._wire.send(Address("state", rank, other, place), tuple(content), other)
                if rank in ranks:
                    found[name] = _copied(content) if copied else content
            elif rank in ranks:
                found[name] = _laid_out(Content(*self._wire.receive(Address("state", owner, rank, place), owner)))
        self._wire.flush()
        return found

    @contextmanager
    def filled(self, contents: Mapping[str, Content]) -> Generator[None]:
        """Inside, the modules hold what `gathered` gave."""
        slots: list[Tensor] = []
        try:
            for name, content in contents.items():
                slots += _fill(name, self.in_turn.modules_of[name], content)
            yield
        finally:
            for slot in slots:
                slot.data = slot.data.new_empty(0)


def _content(module: nn.Module) -> Content:
    layer = unwrapped(module)
    tensors = {name: one.detach() for name, one in named_tensors(layer).items()}
    more = {
        name: part.get_extra_state()
        for name, part in layer.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }
    return Content(tensors, {name: one.stride() for name, one in tensors.items()}, more)


def _copied(content: Content) -> Content:
    return content._replace(tensors={name: one.clone() for name, one in content.tensors.items()})


def _laid_out(content: Content) -> Content:
    """What came over the wire, in the memory format that its sender had: kernels of another may round otherwise."""
    tensors = dict(content.tensors)
    for name, one in tensors.items():
        strided = one.new_empty_strided(one.shape, content.strides[name]) if one.numel() else one
        if strided.stride() != one.stride() and not shares_memory(strided):
            tensors[name] = strided.copy_(one)
    return content._replace(tensors=tensors)


def _fill(name: str, module: nn.Module, content: Content) -> list[Tensor]:
    """Put what a layer holds into a copy of its module; gives the tensors that hold it now."""
    slots = named_tensors(module)
    for one in sorted(slots.keys() ^ content.tensors.keys()):
        raise TaskError(
            f"`{name}.{one}` is {'not there any more' if one in slots else 'new'} since the model was put in stages, "
            f"so the whole model can't be put together for a task that evaluates by itself or asks the average; let "
            f"layers have all their parameters and buffers when `PipelineModel` is built."
        )
    for one, slot in slots.items():
        slot.data = content.tensors[one]
    parts = dict(module.named_modules())
    for one, state in content.more.items():
        parts[one].set_extra_state(state)
    return list(slots.values())
