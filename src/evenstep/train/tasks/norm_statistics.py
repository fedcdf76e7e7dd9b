"""What the running statistics of normalisation layers mean where an update holds several tasks' batches.

"shared": every batch of every task moves them, in the order of the micro-batches. "per-task": each task has its own;
the layer's usual buffers are those of the first task. "frozen": nothing moves them, and they are used in training as
in evaluation, while scale and shift go on being trained. It does not change layers whose statistics are not running.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias, final

import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.nothing import NOTHING
from evenstep.options import NormStatistics
from evenstep.parallel.buffers import is_norm

Place: TypeAlias = tuple[nn.Module, str, str]

_FROZEN = "`train=Training(norm_statistics='frozen')`, in a run file `train.norm_statistics = \"frozen\"`"


def explain(error: Exception, *, cut: bool = False) -> None:
    """Add to torch's refusal of a batch with one value per channel where such a batch comes from, and what to do.

    Args:
        cut: whether it is a part of a micro-batch that did not fit into memory.
    """
    if "Expected more than 1 value per channel" not in str(error):
        return
    if cut:
        error.add_note(
            "The micro-batch did not fit into memory, so it was cut, and a part of one sample has no statistics of its "
            "own. If two samples fit, choose `micro_batch_size` 2 and `global_batch_size` a multiple of it; else need "
            "less memory (`memory.checkpoint`, a precision of 16 bits), or normalise by the running statistics "
            f"({_FROZEN})."
        )
    else:
        error.add_note(
            "A micro-batch of one sample has no statistics of its own: choose `global_batch_size` and "
            "`micro_batch_size` so that no sample is left alone, leave one out (`torch.utils.data.Subset`), or "
            f"normalise by the running statistics ({_FROZEN})."
        )


@final
class Norms:
    """The normalisation layers of a model, by default with statistics that all tasks share.

    Args:
        frozen: those whose statistics do not move.
        own: where statistics stand that are of one task: layers, with the names of two buffers that change places.

    Attributes:
        by_task: whether each task has its own.
    """

    def __init__(self, frozen: Sequence[nn.Module] = (), own: Mapping[str, Sequence[Place]] | None = None) -> None:
        self._frozen, self._own = frozen, own or {}
        self.by_task = own is not None

    def prepare(self) -> None:
        """Put the layers into the mode that they are trained in; the model is in training mode."""
        for layer in self._frozen:
            layer.eval()

    def of(self, task: str) -> AbstractContextManager[None]:
        """The layers have the statistics of `task` inside the `with`."""
        return _exchanged(self._own[task]) if task in self._own else NOTHING


@contextmanager
def _exchanged(places: Sequence[Place]) -> Generator[None]:
    _exchange(places)
    try:
        yield
    finally:
        _exchange(places)


def _exchange(places: Sequence[Place]) -> None:
    for layer, one, other in places:
        kept = layer.get_buffer(one)
        setattr(layer, one, layer.get_buffer(other))
        setattr(layer, other, kept)


def build_norms(model: nn.Module, tasks: Sequence[str], kind: NormStatistics) -> Norms:
    """The normalisation layers of `model` with the statistics asked for.

    A task's own are in buffers of the layer called `running_mean_<task>` and so on.

    Raises:
        ArgumentError: each task is to have its own in a layer that takes no more buffers.

    >>> layer = nn.BatchNorm1d(1); norms = build_norms(layer, ("class", "box"), "per-task")
    >>> with norms.of("box"): _ = layer(torch.tensor([[1.0], [3.0]]))
    >>> layer.running_mean.item(), round(layer.running_mean_box.item(), 2)
    (0.0, 0.2)
    >>> build_norms(layer, (), "frozen").prepare(); layer.training
    False
    """
    named = [
        (name, layer) for name, layer in model.named_modules() if is_norm(layer) and layer.running_mean is not None
    ]
    layers = [layer for _, layer in named]
    if kind == "frozen":
        return Norms(layers)
    if kind == "shared":
        return Norms()
    compiled = [name for name, layer in named if isinstance(layer, torch.jit.ScriptModule)]
    if compiled:
        raise ArgumentError(
            f'`norm_statistics` is "per-task", but `{compiled[0]}` is compiled by `torch.jit`, which takes no '
            f'buffers of single tasks; give it as it was before that, or let them be "shared" or "frozen".'
        )
    usual = [(layer, name, buffer) for layer in layers for name, buffer in layer.named_buffers(recurse=False)]
    for task in tasks[1:]:
        for layer, name, buffer in usual:
            layer.register_buffer(f"{name}_{task}", buffer.detach().clone())
    return Norms(own={task: [(layer, name, f"{name}_{task}") for layer, name, _ in usual] for task in tasks[1:]})
