"""A model in stages, of which this process holds its own.

Layers are built, seeded and named one by one, so training does not depend on how stages are spread over ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from operator import itemgetter
from typing import Any, cast, final

from torch import nn

from evenstep import training_mode
from evenstep.arguments import choose
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import children_of, has_gradient_hooks, times_written, unwrapped
from evenstep.parallel.group import Group
from evenstep.parallel.mesh import Mesh
from evenstep.pipeline.trees import tensors
from evenstep.pipeline.layers import Build, Layer, Layers, arguments, built, check_covered
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules import SCHEDULES, Schedule
from evenstep.pipeline.split import cut, flows, stages_per_rank_for
from evenstep.pipeline.ties import Tie, equalise
from evenstep.tensors import named_parameters


@final
class StageModule(nn.Module):
    """The layers of one stage of a model, under their names in the whole model.

    Args:
        places: places of this stage's layers.
        leaving: places of the layers whose output leaves the stage, also of earlier stages' outputs that are sent on.
        modules: modules of this stage's layers; a compiled one keeps the names of its original.
    """

    def __init__(self, layers: Layers, places: range, leaving: Sequence[int], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.places = places
        self._leaving = tuple(leaving)
        self._sources = [layers.sources(place) for place in places]
        self._wanted = [layers.inputs(place) for place in places]
        self._calls: list[Callable[..., Any]] = [*modules]
        self._names = [layers.layers[place].name for place in places]
        self._layer_names = [layer.name for layer in layers.layers]
        last_use = {source: place for place in places for source in layers.sources(place)}
        self._done = [
            [source for source, last in last_use.items() if last == place and source not in self._leaving]
            for place in places
        ]
        later = {source for place in range(places.stop, len(layers.layers)) for source in layers.sources(place)}
        self._taken_later = [source for source in last_use if source not in places and source in later - {*leaving}]
        for place, module in zip(places, modules, strict=True):
            register(self, layers.layers[place].name, module)

    @property
    def takes_inputs(self) -> bool:
        return any(self._wanted)

    def forward(
        self, received: Mapping[int, Any], inputs: Any, begin: Callable[[int], None] | None = None
    ) -> dict[int, Any]:
        """Run the layers; gives the outputs that leave the stage, by place.

        Args:
            received: outputs of earlier stages' layers, by place.
            inputs: the task's inputs.
            begin: called with a layer's place before it runs.
        """
        values = dict(received)
        kept = [(source, received[source], _times(received[source])) for source in self._taken_later]
        for number, place in enumerate(self.places):
            if begin is not None:
                begin(place)
            outputs = [values[source] for source in self._sources[number]]
            for source in self._done[number]:
                del values[source]
            positional, named = arguments(outputs, inputs, self._wanted[number])
            values[place] = self._calls[number](*positional, **named)
            del outputs, positional
        for source, tree, times in kept:
            if _times(tree) != times:
                raise TaskError(
                    f"the output of layer '{self._layer_names[source]}' was changed in place in another stage, but a "
                    f"later stage takes it as well; write into a copy, or cut the model elsewhere (`split_at`)."
                )
        return {place: values[place] for place in self._leaving}

    @property
    def called(self) -> dict[str, nn.Module]:
        """The layers by name; of a compiled one the compiled module."""
        return dict(zip(self._names, cast("list[nn.Module]", self._calls), strict=True))

    def compile_layers(self, *args: Any, **kwargs: Any) -> None:
        for called in self._calls:
            cast("nn.Module", called).compile(*args, **kwargs)


def _times(tree: Any) -> list[int]:
    return [0 if tensor.is_inference() else times_written(tensor) for tensor in tensors(tree)]


def register(root: nn.Module, name: str, module: nn.Module) -> None:
    *above, last = name.split(".")
    parts = children_of(root)
    for part in above:
        parts = children_of(parts.setdefault(part, nn.Module()))
    parts[last] = unwrapped(module)


@final
class PipelineModel(nn.Module):
    """A model in stages.

    Args:
        model: an `nn.Sequential`, a list of modules or of functions that build one, `Layers`, or any module with a
            method `layers()`. Functions are called only for the layers of this rank, each seeded by itself, so that
            no rank holds the whole model.
        mesh: the ranks; one process by default.
        schedule: name of the pipeline schedule.
        stages_per_rank: how many stages each rank holds; None: as few as the schedule allows.
        split_at: names of the layers that begin the second and later stages; None: equal numbers of layers.
        ties: sets of names of parameters that are one; those that modules share are found by themselves.
        seed: of the layers that are built here.

    Raises:
        ArgumentError: the model can't be cut like this.
        PlanError: the pipeline schedule can't run these stages.

    >>> model = PipelineModel(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), stages_per_rank=2)
    >>> model.layout.rank_of, list(model.state_dict())
    ((0, 0), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    def __init__(
        self,
        model: nn.Module | Layers | Sequence[Layer | Build],
        *,
        mesh: Mesh | None = None,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        split_at: Sequence[str] | None = None,
        ties: Sequence[tuple[str, ...]] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        chosen = choose("schedule", schedule, SCHEDULES)
        self.mesh = mesh or Mesh()
        ranks = self.mesh.pipeline.ranks
        self.schedule: Schedule = chosen if ranks > 1 else SCHEDULES["sequential"]
        self.layers = Layers.of(model)
        check_covered(model, self.layers)
        if isinstance(model, nn.Module):
            # a `train` of the model's own, or of a part that holds layers, is not called later
            if model.training or training_mode.is_own(model):
                training_mode.train(model)
            self.training = model.training
        if stages_per_rank is None:
            stages_per_rank = stages_per_rank_for(split_at, ranks=ranks)
        chain = self.schedule.layout(ranks, stages_per_rank)
        self._places = cut(self.layers, stages=chain.stages, split_at=split_at)
        names = [layer.name for layer in self.layers.layers]
        stages = ", ".join(names[places[0]] for places in self._places)
        said = {"schedule": schedule, "layers": ", ".join(names), "stages at": stages}
        _check_alike(said, self.mesh.pipeline)
        self.carried = flows(self.layers, self._places)
        self.layout = Layout(rank_of=chain.rank_of, edges=tuple(self.carried))
        self.own = self.layout.stages_of(self.mesh.pipeline.rank)
        shared = _shared(self.layers)
        mine = self._build(seed)
        _separate(mine.values())
        _check_whole(mine.values())
        # what other ranks hold must not stay here because this refers to it
        kept = tuple(replace(layer, build=nn.Identity) for layer in self.layers.layers)
        self.layers = Layers(kept, self.layers.ties)
        self.stage_modules = {stage: self._stage_module(stage, mine) for stage in self.own}
        self.ties = self._tied((*self.layers.ties, *ties, *shared))
        for place, module in mine.items():
            register(self, self.layers.layers[place].name, module)
        equalise(self.ties, named_parameters(self), self.mesh.pipeline)

    @property
    def last(self) -> int:
        """The stage whose output goes to the task's loss."""
        return self.layout.stages - 1

    @property
    def aliases(self) -> dict[str, str]:
        """For each copy of a tied parameter its name in checkpoints."""
        return {name: tie.names[0] for tie in self.ties for name in tie.names[1:]}

    def count_parameters(self) -> tuple[int, int]:
        """How many numbers the whole model's parameters hold, tied ones once, and how many of them are trained.

        All pipeline ranks call it together.

        >>> PipelineModel([nn.Linear(2, 3), nn.Linear(3, 1)]).count_parameters()
        (13, 13)
        """
        mine = {name for name, parameter in named_parameters(self).items() if parameter.requires_grad}
        trained = set[str]().union(*self.mesh.pipeline.gather(mine))
        sizes = self.parameter_sizes()
        return sum(sizes.values()), sum(size for name, size in sizes.items() if name in trained)

    def parameter_sizes(self) -> dict[str, int]:
        """How many numbers each parameter of the whole model holds, in the order of the layers, tied ones once.

        All pipeline ranks call it together.

        >>> PipelineModel([nn.Linear(2, 3), nn.Linear(3, 1)]).parameter_sizes()
        {'0.weight': 6, '0.bias': 3, '1.weight': 3, '1.bias': 1}
        """
        copies = self.aliases
        return {name: size for name, (_, size) in self._held().items() if name not in copies}

    def described(self) -> dict[int, str]:
        """The names of the first and last layer of each stage that this rank holds.

        >>> PipelineModel([nn.ReLU(), nn.ReLU(), nn.ReLU()], stages_per_rank=2).described()
        {0: '0', 1: '1 … 2'}
        """
        names = [layer.name for layer in self.layers.layers]
        ends = {stage: (names[self._places[stage][0]], names[self._places[stage][-1]]) for stage in self.own}
        return {stage: first if first == last else f"{first} … {last}" for stage, (first, last) in ends.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's output, where this process holds all of its stages.

        Raises:
            TaskError: other ranks hold some.
        """
        if self.layout.ranks > 1:
            raise TaskError(
                f"this rank holds {len(self.own)} of the model's {self.layout.stages} stages, so it can't be called "
                f"here; evaluate with the trainer, or load a checkpoint into a model on one process."
            )
        values: dict[int, Any] = {}
        for stage in self.own:
            values |= self.stage_modules[stage](values, kwargs or args)
        return values[len(self.layers.layers) - 1]

    def get_submodule(self, target: str) -> nn.Module:
        """A part of the model by its name, which may begin like an attribute, such as `layers`."""
        first, _, rest = target.partition(".")
        parts = children_of(self)
        return parts[first].get_submodule(rest) if first in parts else super().get_submodule(target)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer by itself, with the arguments of `torch.compile`; names of parameters stay."""
        for module in self.stage_modules.values():
            module.compile_layers(*args, **kwargs)

    def own_layers(self) -> dict[str, nn.Module]:
        """This rank's layers by name, as they are called.

        >>> [*PipelineModel([nn.ReLU(), nn.Tanh()]).own_layers()]
        ['0', '1']
        """
        return {name: one for stage in self.own for name, one in self.stage_modules[stage].called.items()}

    def _build(self, seed: int) -> dict[int, nn.Module]:
        places = (place for stage in self.own for place in self._places[stage])
        return {place: built(self.layers.layers[place], place, seed) for place in places}

    def _stage_module(self, stage: int, modules: dict[int, nn.Module]) -> StageModule:
        places = self._places[stage]
        leaving = {place for edge, carried in self.carried.items() if edge[0] == stage for place in carried}
        if stage == self.last:
            leaving.add(places[-1])
        return StageModule(self.layers, places, sorted(leaving), [modules[place] for place in places])

    def _held(self) -> dict[str, tuple[int, int]]:
        mine: list[tuple[int, dict[str, int]]] = []
        for module in self.stage_modules.values():
            sizes = {name: parameter.numel() for name, parameter in named_parameters(module).items()}
            for place in module.places:
                layer = self.layers.layers[place].name
                mine.append((place, {name: size for name, size in sizes.items() if name.startswith(f"{layer}.")}))
        everybody = self.mesh.pipeline.gather(mine)
        held = [(place, sizes, rank) for rank, own in enumerate(everybody) for place, sizes in own]
        in_order = sorted(held, key=itemgetter(0))
        return {name: (rank, size) for _, sizes, rank in in_order for name, size in sizes.items()}

    def _tied(self, tied: Sequence[tuple[str, ...]]) -> tuple[Tie, ...]:
        held = self._held()
        groups = [group for theirs in self.mesh.pipeline.gather(list(tied)) for group in theirs]
        return tuple(Tie(tie, tuple(held[name][0] for name in tie)) for tie in _joined(groups, list(held)))


def _check_alike(said: Mapping[str, object], group: Group) -> None:
    first, *others = group.gather(dict(said))
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs[name] != value:
                raise ArgumentError(
                    f"all ranks of a pipeline must cut one model alike, but rank 0 has {name} {value} and rank {rank} "
                    f"{theirs[name]}; build it with the same arguments on all of them."
                )


def _shared(layers: Layers) -> list[tuple[str, ...]]:
    modules: dict[int, str] = {}
    parameters: dict[int, list[str]] = {}
    for layer in layers.layers:
        if not isinstance(layer.build, nn.Module):
            continue
        for part in layer.build.modules():
            if not (any(True for _ in part.parameters()) or any(True for _ in part.buffers())):
                continue  # an activation: each rank may have one of its own
            first = modules.setdefault(id(part), layer.name)
            if first != layer.name:
                raise ArgumentError(
                    f"layers '{first}' and '{layer.name}' share a module, so they can't be put on different ranks; "
                    f"give each a module of its own, and name their parameters in `ties`."
                )
        for name, parameter in named_parameters(unwrapped(layer.build)).items():
            parameters.setdefault(id(parameter), []).append(f"{layer.name}.{name}")
    return [tuple(names) for names in parameters.values() if len(names) > 1]


def _separate(modules: Iterable[nn.Module]) -> None:
    seen: dict[int, nn.Module] = {}
    for module in modules:
        copies: dict[int, nn.Parameter] = {}
        for part in unwrapped(module).modules():
            for name, parameter in part.named_parameters(recurse=False):
                if seen.setdefault(id(parameter), module) is not module:
                    if has_gradient_hooks(parameter):
                        raise ArgumentError(
                            f"`{name}` of {part} is shared by layers and has a hook, which the copies in stages would "
                            f"not call; change the gradient in the forward (`torch.autograd.Function`).",
                            field=name,
                        )
                    own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    copy = copies.setdefault(id(parameter), own)
                    setattr(part, name, copy)
                    seen[id(copy)] = module


def _check_whole(modules: Iterable[nn.Module]) -> None:
    for part in (part for module in modules for part in unwrapped(module).modules()):
        for name, parameter in part.named_parameters(recurse=False):
            if hasattr(parameter, "placements"):  # a DTensor, without importing what it is made of
                raise ArgumentError(
                    f"`{name}` of {part} is cut over ranks (tensor parallelism), which stages can't hold; give the "
                    f"model uncut.",
                    field=name,
                )


def pipeline_of(model: nn.Module) -> Group:
    """The ranks that hold the stages of one model together; of a model that is whole, this one.

    >>> pipeline_of(nn.Linear(1, 1)).ranks
    1
    """
    return model.mesh.pipeline if isinstance(model, PipelineModel) else Group()


def _joined(groups: Sequence[tuple[str, ...]], names: Sequence[str]) -> list[tuple[str, ...]]:
    joined: list[set[str]] = []
    for group in groups:
        unknown = [name for name in group if name not in names]
        if unknown:
            raise ArgumentError(
                f"`ties` must name parameters of different layers, but '{unknown[0]}' is none; there are "
                f"{', '.join(get_close_matches(unknown[0], names) or names[:8])}.",
                field="ties",
            )
        apart = [other for other in joined if not other & set(group)]
        joined = [*apart, set(group).union(*(other for other in joined if other & set(group)))]
    return sorted(tuple(sorted(group, key=names.index)) for group in joined if len(group) > 1)


def in_stages(model: nn.Module) -> bool:
    return pipeline_of(model).ranks > 1
