"""What the running statistics of normalisation layers mean where an update holds several tasks' batches.

"shared": every batch of every task moves them, in the order of the micro-batches. "per-task": each task has its own;
the layer's usual buffers are those of the first task. "frozen": nothing moves them, and they are used in training as
in evaluation, while scale and shift go on being trained. It does not change layers whose statistics are not running.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal, final

from torch import nn

from evenstep.parallel.buffers import NORMS

Kind = Literal["shared", "per-task", "frozen"]


def explain(error: Exception) -> None:
    """Add to torch's refusal of a batch with one value per channel where such a batch comes from, and what to do."""
    if "Expected more than 1 value per channel" in str(error):
        error.add_note(
            "A micro-batch of one sample has no statistics of its own: choose `global_batch_size` and "
            "`micro_batch_size` so that no sample is left alone, leave one out (`torch.utils.data.Subset`), or "
            "normalise by the running statistics (`Training(norm_statistics='frozen')`)."
        )


class Norms:
    """The normalisation layers of a model, with statistics shared by all tasks."""

    by_task: bool = False

    def prepare(self) -> None:
        """Put the layers into the mode that they are trained in; the model is in training mode."""

    def of(self, task: str) -> AbstractContextManager[None]:
        """The layers have the statistics of `task` inside the `with`."""
        return nullcontext()


@final
class FrozenNorms(Norms):
    """Statistics that do not move.

    >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()).train()
    >>> FrozenNorms(model).prepare()
    >>> model.training, model[0].training
    (True, False)
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = _layers(model)

    def prepare(self) -> None:
        for layer in self._layers:
            layer.eval()


@final
class TaskNorms(Norms):
    """Statistics of each task's own, in buffers of the layer called `running_mean_<task>` and so on.

    >>> import torch
    >>> layer = nn.BatchNorm1d(1); norms = TaskNorms(layer, ("class", "box"))
    >>> with norms.of("box"): _ = layer(torch.tensor([[1.0], [3.0]]))
    >>> layer.running_mean.item(), round(layer.running_mean_box.item(), 2)
    (0.0, 0.2)
    """

    by_task = True

    def __init__(self, model: nn.Module, tasks: Sequence[str]) -> None:
        self._swaps: dict[str, _Swap] = {}
        layers = _layers(model)
        usual = [(layer, name, buffer) for layer in layers for name, buffer in layer.named_buffers(recurse=False)]
        for task in tasks[1:]:
            places: list[tuple[nn.Module, str, str]] = []
            for layer, name, buffer in usual:
                layer.register_buffer(f"{name}_{task}", buffer.detach().clone())
                places.append((layer, name, f"{name}_{task}"))
            self._swaps[task] = _Swap(places)

    def of(self, task: str) -> AbstractContextManager[None]:
        return self._swaps.get(task) or nullcontext()


@final
class _Swap(AbstractContextManager[None]):
    """Exchanges two buffers of layers, and back at the end."""

    __slots__ = ("_places",)

    def __init__(self, places: list[tuple[nn.Module, str, str]]) -> None:
        self._places = places

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exchange()

    def _exchange(self) -> None:
        for layer, one, other in self._places:
            kept = layer.get_buffer(one)
            setattr(layer, one, layer.get_buffer(other))
            setattr(layer, other, kept)


def build_norms(model: nn.Module, tasks: Sequence[str], kind: Kind) -> Norms:
    """The normalisation layers of `model` with the statistics asked for."""
    if kind == "frozen":
        return FrozenNorms(model)
    return TaskNorms(model, tasks) if kind == "per-task" else Norms()


def _layers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, NORMS) and layer.running_mean is not None]
