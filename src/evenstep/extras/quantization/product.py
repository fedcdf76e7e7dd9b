"""Iterative product quantisation: weights become codebooks, group of layers after group, while training goes on.

    b_ij = W[i, j·d : (j + 1)·d]              blocks of d neighbouring weights of a row
    W ← c[a]                                  at a set update: centroids c [K, d], and to which each block is assigned
    ∂L/∂c_k = (1/|J_k|) Σ_{ij ∈ J_k} ∂L/∂b_ij    from then on, J_k being the blocks that are assigned to k

The layers that are not yet quantised go on training and make up for what the others have lost; the assignments stay.
Reference: Stock et al., "And the bit goes down: revisiting the quantization of neural networks", 2020
(https://arxiv.org/abs/1907.05686); and Fan et al., "Training with quantization noise for extreme model
compression", 2020 (https://arxiv.org/abs/2004.07320), for whose noise see `noise`. Codebooks are made by plain k-means:
blocks are not weighed by activations.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Literal, cast, final, get_args

import torch
from torch import Tensor, nn

from evenstep.arguments import require_names, require_seed, require_whole, require_word, said
from evenstep.errors import ArgumentError
from evenstep.events import Hook, StepEnd, TrainBegin, UpdateEnd
from evenstep.events.hook import HookTrainer
from evenstep.extras.quantization.codebook import build_codebook
from evenstep.extras.quantization.layers import KINDS, ProductQuantized, change, on_all_stages
from evenstep.keys import key
from evenstep.names import parameters_in
from evenstep.optim.multi import inner
from evenstep.parallel.layout import whole_tensor
from evenstep.pipeline import PipelineModel

Gradient = Literal["mean", "sum"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are quantised at one update.

    Args:
        layers: patterns of their names, in which `*` is any text: "blocks.*.mlp.*".
        after_update: after how many committed updates; 0: before the first.
        block_size: how many neighbouring weights of a row are a block; it divides the rows of all of them.
        num_centroids: how many blocks a layer's codebook has.

    Raises:
        ArgumentError: an argument that cannot be.

    >>> LayerGroup(layers=("head",), after_update=100, block_size=4).num_centroids
    256
    """

    layers: Sequence[str]
    after_update: int
    block_size: int = 8
    num_centroids: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", require_names("layers", self.layers, "`layers=('blocks.*',)`"))
        require_whole("after_update", self.after_update, at_least=0, advice="0 quantises before the first")
        require_whole("block_size", self.block_size, advice="8 or 4 is usual")
        require_whole("num_centroids", self.num_centroids, at_least=2, advice="256 is usual")


@final
class ProductQuantization(Hook):
    """Quantises groups of layers at set updates, and has their centroids trained from then on.

    Give it the model before the optimizer is built from `model.parameters()`: `prepare` adds the centroids to the
    layers. In a run file it is done for you.

    Args:
        groups: in any order; in a run file tables of the same names.
        iterations: of k-means, at most.
        gradient: what a centroid's is of those of its blocks.
        seed: of the blocks that k-means begins with.

    Raises:
        ArgumentError: an argument that cannot be.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    >>> hook = ProductQuantization([LayerGroup(layers=("0",), after_update=10, block_size=4, num_centroids=4)])
    >>> hook.prepare(model)
    >>> model
    Sequential(
      (0): ProductQuantizedLinear(in_features=8, out_features=16, bias=True)
      (1): Linear(in_features=16, out_features=2, bias=True)
    )
    >>> [name for name, _ in model.named_parameters()]
    ['0.weight', '0.bias', '0.centroids', '1.weight', '1.bias']
    """

    failure_policy = "stop"  # a run must not go on with some layers quantised, or without what `settle` has raised

    def __init__(
        self,
        groups: Sequence[LayerGroup | Mapping[str, Any]],
        *,
        iterations: int = 15,
        gradient: Gradient = "mean",
        seed: int = 0,
    ) -> None:
        require_whole("iterations", iterations, advice="15 is usual")
        require_word("gradient", gradient, get_args(Gradient))
        require_seed(seed)
        self._groups = sorted((_group(one) for one in groups), key=lambda group: group.after_update)
        if not self._groups:
            raise ArgumentError("`groups` must hold at least one `LayerGroup`, but is empty.")
        self._iterations, self._gradient, self._seed = iterations, gradient, seed
        self._layers: list[tuple[LayerGroup, str, ProductQuantized]] = []

    def prepare(self, model: nn.Module) -> None:
        """Make the layers of all groups such that can be quantised; before the optimizer is built.

        Of a model in stages each rank has its own; all call it together.

        Raises:
            ArgumentError: a pattern that fits no layer, a layer that two groups take, or one that can't be quantised.
        """
        chosen = self._chosen(model, (*KINDS, ProductQuantized))
        _check_ties(model, {name for _, name in chosen})
        for group, name in chosen:
            change(
                name,
                model.get_submodule(name),
                block_size=group.block_size,
                num_centroids=group.num_centroids,
                averages=self._gradient == "mean",
            )

    def attach(self, trainer: HookTrainer) -> None:
        self._layers = []
        held = {id(one) for each in inner(trainer.optimizer) for one in parameters_in(each)}
        for group, name in self._chosen(trainer.model, (ProductQuantized,)):
            layer = cast("ProductQuantized", trainer.model.get_submodule(name))
            if id(layer.centroids) not in held:
                raise ArgumentError(
                    f"the optimizer does not hold `{name}.centroids`, so they would not be trained; build it after "
                    f"`prepare(model)` of ProductQuantization, from the model's `parameters()`."
                )
            self._layers.append((group, name, layer))
        for _, _, layer in self._layers:
            (layer.dense if layer.is_quantized else layer.centroids).requires_grad_(False)
        super().attach(trainer)

    def before_train(self, event: TrainBegin) -> None:
        self._quantize_due()

    def after_step(self, event: StepEnd) -> None:
        for _, _, layer in self._layers:
            if layer.is_quantized:
                layer.refresh()

    def after_update(self, event: UpdateEnd) -> None:
        if any(event.update == group.after_update for group in self._groups):  # also on ranks without such layers
            self.trainer.settle()  # after which an update may turn out to be made again
            self._quantize_due()

    def _quantize_due(self) -> None:
        for group, name, layer in self._layers:
            if layer.is_quantized or group.after_update > self.trainer.progress.update:
                continue
            generator = torch.Generator().manual_seed(key(self._seed, "codebook", name))
            blocks, (num_centroids, block_size) = whole_tensor(layer.dense), layer.centroids.shape
            centroids, assigned = build_codebook(
                blocks.reshape(-1, block_size), num_centroids, iterations=self._iterations, generator=generator
            )
            layer.quantize(centroids, assigned)
            layer.centroids.requires_grad_(layer.dense.requires_grad)  # of a frozen layer they are frozen too
            layer.dense.requires_grad_(False).grad = None
            self.trainer.begin_afresh([f"{name}.{one}" for one in ("weight", "centroids", "assignments")])

    def _chosen(self, model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[tuple[LayerGroup, str]]:
        """Each layer of these classes that a group takes, by name: of a model in stages those that this rank has."""
        there = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        names = on_all_stages(model, there)
        taken: dict[str, LayerGroup] = {}
        for group in self._groups:
            for pattern in group.layers:
                fitting = [name for name in names if fnmatchcase(name, pattern)]
                if not fitting:
                    unprepared = "was prepared: call `prepare(model)` before the optimizer is built"
                    what = "can be quantised" if nn.Linear in kinds else unprepared
                    near = get_close_matches(pattern, names, cutoff=0.4) or names[:8]
                    raise ArgumentError(
                        f"`layers` of ProductQuantization has {pattern!r}, which fits no layer that {what}; near it "
                        f"are {', '.join(near) or 'none'}."
                    )
                for name in fitting:
                    if taken.setdefault(name, group) is not group:
                        raise ArgumentError(f"`{name}` is in two groups of ProductQuantization; leave it out of one.")
        return [(group, name) for name, group in taken.items() if name in there]


def compressed_state(model: nn.Module) -> dict[str, Tensor]:
    """What is left of a model's `state_dict` where quantised layers are stored as codebooks, by the model's names.

    A quantised layer has `centroids` and `assignments`, these in 8 bits where there are up to 256, instead of its
    `weight`, which is `centroids[assignments]` in its shape; a layer that is not quantised yet has its weight only.
    Ranks that hold shards of the model call it together, and each gets all.

    Raises:
        ArgumentError: the model is in stages.

    >>> model = nn.Sequential(nn.Linear(8, 16))
    >>> ProductQuantization([{"layers": ["0"], "after_update": 10, "num_centroids": 4}]).prepare(model)
    >>> list(compressed_state(model))
    ['0.weight', '0.bias']
    """
    if isinstance(model, PipelineModel):
        raise ArgumentError(
            "`compressed_state` is of a whole model, but this one is in stages; build the model in one process, "
            "`prepare` it, load the checkpoint with `evenstep.load_weights`, and give that."
        )
    state: dict[str, Tensor] = {name: one.detach() for name, one in model.state_dict().items()}
    for name, layer in model.named_modules():
        if not isinstance(layer, ProductQuantized):
            continue
        prefix = f"{name}." if name else ""
        if layer.is_quantized:
            del state[f"{prefix}weight"]
            smallest = torch.uint8 if len(layer.centroids) <= 256 else torch.int32
            state[f"{prefix}assignments"] = state[f"{prefix}assignments"].to(smallest)
        else:
            del state[f"{prefix}centroids"], state[f"{prefix}assignments"]
    return {name: whole_tensor(one) for name, one in state.items()}


def _group(given: LayerGroup | Mapping[str, Any]) -> LayerGroup:
    if isinstance(given, LayerGroup):
        return given
    if not isinstance(cast("object", given), Mapping):
        raise ArgumentError(
            f"`groups` must hold `LayerGroup`s, but has {said(given)}; write "
            f"`ProductQuantization([LayerGroup(layers=('blocks.*',), after_update=1000)])`."
        )
    try:
        return LayerGroup(**given)
    except TypeError as error:
        raise ArgumentError(
            f"`groups` has a table of {', '.join(map(str, given))}, but a group has `layers`, `after_update`, "
            f"`block_size` and `num_centroids`, of which the first two must be given."
        ) from error


def _check_ties(model: nn.Module, chosen: Collection[str]) -> None:
    """Raise ArgumentError for a layer whose weight is another's as well: one of them would be left behind."""
    holders: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(one), []).append(name)
    stages = model.ties if isinstance(model, PipelineModel) else ()
    together = [names for names in (*holders.values(), *(tie.names for tie in stages)) if len(names) > 1]
    for name, names in product(chosen, together):
        if f"{name}.weight" in names:
            others = [other for other in names if other != f"{name}.weight"]
            raise ArgumentError(
                f"`{name}.weight` is also `{others[0]}`, which would not be quantised with it; leave the layer out, or "
                f"untie them."
            )
