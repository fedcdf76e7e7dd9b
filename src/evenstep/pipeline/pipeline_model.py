"""Model in stages: the part of this process.

Layers are built, seeded and named one by one, so training does not depend on the ranks of stages.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from evenstep import training_mode
from evenstep.arguments import choose, first_of
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import children_of, has_gradient_hooks, pytree, unwrapped
from evenstep.parallel.group import Group, Mesh
from evenstep.pipeline.action import Layout
from evenstep.pipeline.layers import (
    Build,
    Layer,
    Layers,
    arguments,
    built,
    check_covered,
    cut,
    flows,
    stages_per_rank_for,
)
from evenstep.pipeline.schedules import SCHEDULES, Schedule
from evenstep.pipeline.ties import Tie, equalise
from evenstep.tensors import named_parameters


@final
class StageModule(nn.Module):
    """The layers of one stage of a model, under their names in the whole model.

    Args:
        modules: this stage's layers by place.
        leaving: places of the layers whose output leaves the stage.

    Attributes:
        called: the layers by name; of a compiled one the compiled module.
        uses: by place of a layer, how many layers of this stage take its output.
    """

    def __init__(self, layers: Layers, modules: Mapping[int, nn.Module], leaving: Iterable[int]) -> None:
        super().__init__()
        self._leaving = set(leaving)
        self.called = {layers.layers[place].name: module for place, module in modules.items()}
        self._steps = [
            (place, module, layers.sources(place), layers.inputs(place)) for place, module in modules.items()
        ]
        self.uses = Counter(source for place in modules for source in layers.sources(place))
        uses = Counter(source for place in range(len(layers.layers)) for source in layers.sources(place))
        self._shared = {source for source, number in uses.items() if number > 1}
        for name, module in self.called.items():
            register(self, name, module)

    @property
    def takes_inputs(self) -> bool:
        return any(inputs for _, _, _, inputs in self._steps)

    def forward(
        self, received: Mapping[int, Sequence[Any]], inputs: Any, begin: Callable[[int], None] | None = None
    ) -> dict[int, Any]:
        """Run the layers on outputs of earlier stages and the task's inputs; gives the outputs that leave, by place.

        Args:
            received: outputs by place, each once for each layer that takes it.
            begin: called with a layer's place before it runs.
        """
        values = {source: list(copies) for source, copies in received.items()}
        leaving: dict[int, Any] = {}

        def take(source: int) -> Any:
            value = values[source].pop(0)
            # autograd then adds the gradients within each of several layers first, also where they are in other stages
            return pytree.tree_map_only(Tensor, _identity, value) if source in self._shared else value

        for place, call, sources, taken in self._steps:
            if begin is not None:
                begin(place)
            positional, named = arguments([take(source) for source in sources], inputs, taken)
            output = call(*positional, **named)
            values[place] = [output] * self.uses[place]
            if place in self._leaving:
                leaving[place] = output
            del positional, output
        return leaving


def _identity(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def register(root: nn.Module, name: str, module: nn.Module) -> None:
    *above, last = name.split(".")
    parts = children_of(root)
    for part in above:
        parts = children_of(parts.setdefault(part, nn.Module()))
    parts[last] = unwrapped(module)


@final
class PipelineModel(nn.Module):
    """A model in stages.

    Attributes:
        names: of all layers.
        sizes: numbers in each parameter of the whole model, in the order of the layers, tied ones once.

    Args:
        model: an `nn.Sequential`, a list of modules or of functions that build one, `Layers`, or any module with a
            method `layers()`. Functions are called for the layers of this rank only.
        mesh: the ranks; one process by default.
        schedule: a pipeline schedule, or the name of one in `SCHEDULES`.
        stages_per_rank: number of stages of each rank; by default as few as the schedule allows.
        split_at: names of the layers that begin the second and later stages; by default equal numbers of layers.
        seed: seed of the layers that functions build.

    >>> model = PipelineModel(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), stages_per_rank=2)
    >>> model.layout.rank_of, list(model.state_dict())
    ((0, 0), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    def __init__(
        self,
        model: nn.Module | Layers | Sequence[Layer | Build],
        *,
        mesh: Mesh | None = None,
        schedule: Schedule | str = "1f1b",
        stages_per_rank: int | None = None,
        split_at: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        chosen = schedule if isinstance(schedule, Schedule) else choose("schedule", schedule, SCHEDULES)
        self.mesh = mesh or Mesh()
        pipeline = self.mesh.pipeline
        self.schedule: Schedule = chosen if pipeline.ranks > 1 else SCHEDULES["sequential"]
        layers = Layers.of(model)
        check_covered(model, layers)
        if isinstance(model, nn.Module):
            # a `train` of the model's own, or of a part that holds layers, is not called later
            if model.training or training_mode.is_own(model):
                training_mode.train(model)
            self.training = model.training
        if stages_per_rank is None:
            stages_per_rank = stages_per_rank_for(split_at, ranks=pipeline.ranks)
        chain = self.schedule.layout(pipeline.ranks, stages_per_rank)
        self._places = cut(layers, stages=chain.stages, split_at=split_at)
        self.names = [layer.name for layer in layers.layers]
        stages = ", ".join(self.names[places[0]] for places in self._places)
        _check_alike(f"the schedule {chosen.name}, stages at {stages}, and layers {', '.join(self.names)}", pipeline)
        self.carried = flows(layers, self._places)
        self.layout = Layout(rank_of=chain.rank_of, edges=tuple(self.carried))
        self.own = self.layout.stages_of(pipeline.rank)
        tied = [*layers.ties, *_shared(layers)]
        modules = {place: built(layers.layers[place], place, seed) for n in self.own for place in self._places[n]}
        _separate(modules.values())
        self.stage_modules: dict[int, StageModule] = {}
        for stage in self.own:
            leaving = {place for edge, carried in self.carried.items() if edge[0] == stage for place in carried}
            if stage == self.last_stage:
                leaving.add(self._places[stage][-1])
            own = {place: modules[place] for place in self._places[stage]}
            self.stage_modules[stage] = StageModule(layers, own, leaving)
        for place, module in modules.items():
            register(self, self.names[place], module)
        held = _held(self.own_layers(), self.names, pipeline)
        self.ties: list[Tie] = [{name: held[name][0] for name in tie} for tie in _joined(tied, list(held))]
        self.sizes = {name: size for name, (_, size) in held.items() if name not in self.aliases}
        equalise(self.ties, named_parameters(self), pipeline)

    @property
    def last_stage(self) -> int:
        """The stage whose output goes to the task's loss."""
        return self.layout.stages - 1

    @property
    def aliases(self) -> dict[str, str]:
        """Name in checkpoints of each copy of a tied parameter."""
        return {name: next(iter(tie)) for tie in self.ties for name in [*tie][1:]}

    def count_parameters(self) -> tuple[int, int]:
        """Numbers in the whole model's parameters, tied ones once, and in the trained ones. All ranks call it."""
        mine = {name for name, parameter in named_parameters(self).items() if parameter.requires_grad}
        trained = set[str]().union(*self.mesh.pipeline.gather(mine))
        return sum(self.sizes.values()), sum(size for name, size in self.sizes.items() if name in trained)

    def described(self) -> dict[int, str]:
        """Names of the first and last layer of each stage of this rank."""
        ends = {stage: (self.names[places[0]], self.names[places[-1]]) for stage, places in enumerate(self._places)}
        return {stage: " … ".join(dict.fromkeys(ends[stage])) for stage in self.own}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's output; TaskError if other ranks hold some of its stages."""
        if self.layout.ranks > 1:
            raise TaskError(
                "a model whose stages are on several ranks can't be called; evaluate with the trainer, or load a "
                "checkpoint on one process."
            )
        values: dict[int, Any] = {}
        for stage in self.own:
            module = self.stage_modules[stage]
            received = {place: [value] * module.uses[place] for place, value in values.items()}
            values |= module(received, kwargs or args)
        return values[len(self.names) - 1]

    def own_layers(self) -> dict[str, nn.Module]:
        """This rank's layers by name, as they are called."""
        return {name: one for stage in self.own for name, one in self.stage_modules[stage].called.items()}


def _held(layers: Mapping[str, nn.Module], names: list[str], pipeline: Group) -> dict[str, tuple[int, int]]:
    """Rank and size of each parameter of the whole model, in the order of the layers."""
    mine = [
        (names.index(layer), f"{layer}.{name}", one.numel())
        for layer, module in layers.items()
        for name, one in named_parameters(unwrapped(module)).items()
    ]
    everybody = enumerate(pipeline.gather(mine))
    found = [(place, rank, name, size) for rank, theirs in everybody for place, name, size in theirs]
    return {name: (rank, size) for _, rank, name, size in sorted(found, key=lambda one: one[0])}


def _check_alike(given: str, group: Group) -> None:
    first, *others = group.gather(given)
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            raise ArgumentError(
                f"all ranks of a pipeline must cut one model alike, but rank 0 has {first} and rank {rank} {theirs}."
            )


def _shared(layers: Layers) -> list[tuple[str, ...]]:
    modules: dict[int, str] = {}
    parameters: dict[int, list[str]] = {}
    for layer in layers.layers:
        if not isinstance(layer.build, nn.Module):
            continue
        for part in layer.build.modules():
            if next(part.parameters(), None) is None and next(part.buffers(), None) is None:
                continue  # an activation, which may differ between ranks
            first = modules.setdefault(id(part), layer.name)
            if first != layer.name:
                raise ArgumentError(
                    f"layers '{first}' and '{layer.name}' share a module; give each its own, and name their parameters "
                    f"in `ties`."
                )
        for name, parameter in named_parameters(unwrapped(layer.build)).items():
            parameters.setdefault(id(parameter), []).append(f"{layer.name}.{name}")
    return [tuple(names) for names in parameters.values() if len(names) > 1]


def _separate(modules: Iterable[nn.Module]) -> None:
    # each layer gets its own copy of a parameter that layers share
    seen: set[int] = set()
    for module in modules:
        own: dict[int, nn.Parameter] = {}  # by the id of what the layers share
        for part in unwrapped(module).modules():
            for name, parameter in part.named_parameters(recurse=False):
                if id(parameter) in seen:
                    if has_gradient_hooks(parameter):
                        raise ArgumentError(
                            f"`{name}` of {type(part).__name__} is shared by layers and has a hook, which copies lack; "
                            f"change the gradient in the forward (`torch.autograd.Function`).",
                            field=name,
                        )
                    copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    setattr(part, name, own.setdefault(id(parameter), copy))
                else:
                    own[id(parameter)] = parameter
        seen |= own.keys()


def _joined(groups: Sequence[tuple[str, ...]], names: Sequence[str]) -> list[tuple[str, ...]]:
    joined: list[set[str]] = []
    for group in map(set, groups):
        unknown = [name for name in group if name not in names]
        if unknown:
            raise ArgumentError(
                f"`ties` must name parameters of different layers, but '{unknown[0]}' is none; there are "
                f"{first_of(names)}.",
                field="ties",
            )
        touching = [other for other in joined if other & group]
        joined = [*(other for other in joined if other not in touching), group.union(*touching)]
    return sorted(tuple(sorted(group, key=names.index)) for group in joined if len(group) > 1)


def pipeline_of(model: nn.Module) -> Group:
    """Ranks that share the stages of a model; for a whole model, this rank."""
    return model.mesh.pipeline if isinstance(model, PipelineModel) else Group()


def in_stages(model: nn.Module) -> bool:
    return pipeline_of(model).ranks > 1
