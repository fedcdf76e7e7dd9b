"""Builds the stages of a model in stages on this rank, with the edges between them, and their runner."""

import torch

from evenstep.parallel.strategy import Strategy
from evenstep.pipeline.deferred import Deferral, prepare
from evenstep.pipeline.edges import Edges
from evenstep.pipeline.peers import PipelinePeers
from evenstep.pipeline.runner import Runner
from evenstep.pipeline.stage import Stage
from evenstep.pipeline.staged import Staged


def build_runner(
    model: Staged, strategy: Strategy, device: torch.device, *, deferral: Deferral | None = None
) -> Runner:
    """The runner of this rank's stages.

    Args:
        model: whose.
        strategy: how each stage's gradients are shared between data-parallel ranks; it wraps the stages' modules.
        device: of the model.
        deferral: of weight gradients, to be shared with layers that have a backward of their own.
    """
    layout, deferral = model.layout, deferral or Deferral()
    edges = Edges(layout, model.mesh.pipeline, device)
    for module in model.sections.values():
        if model.schedule.splits_backward:
            prepare(module, deferral)
    for module in model.sections.values():
        strategy.wrap(module)
    stages = [
        Stage(
            module,
            strategy,
            index=index,
            edges=edges,
            sources=layout.sources(index),
            carried={destination: model.carried[index, destination] for destination in layout.destinations(index)},
            gives_loss=index == model.last,
            is_first_here=index == model.own[0],
            is_last_here=index == model.own[-1],
            deferral=deferral,
        )
        for index, module in model.sections.items()
    ]
    return Runner(stages, PipelinePeers(model, edges, deferral))
