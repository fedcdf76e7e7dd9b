"""Builds the stages of a model in stages on this rank, with the edges between them, and their runner."""

import torch

from evenstep.parallel.reducers import Reducers
from evenstep.pipeline.deferred import Deferral, prepare
from evenstep.pipeline.edges import Edges
from evenstep.pipeline.peers import PipelinePeers
from evenstep.pipeline.pipeline_model import PipelineModel
from evenstep.pipeline.runner import Runner
from evenstep.pipeline.stage import Stage


def build_runner(
    model: PipelineModel, reducers: Reducers, device: torch.device, *, deferral: Deferral | None = None
) -> Runner:
    """The runner of this rank's stages.

    Args:
        deferral: of weight gradients, to be shared with layers that have a backward of their own.
    """
    layout, deferral = model.layout, deferral or Deferral()
    edges = Edges(layout, model.mesh.pipeline, device)
    for module in model.stage_modules.values():
        if model.schedule.splits_backward:
            prepare(module, deferral)
    wrapped = {index: reducers.wrap(module) for index, module in model.stage_modules.items()}
    stages = [
        Stage(
            module,
            reducer,
            index=index,
            edges=edges,
            sources=layout.sources(index),
            carried={destination: model.carried[index, destination] for destination in layout.destinations(index)},
            gives_loss=index == model.last,
            is_first_here=index == model.own[0],
            is_last_here=index == model.own[-1],
            deferral=deferral,
        )
        for index, (module, reducer) in wrapped.items()
    ]
    return Runner(stages, PipelinePeers(model, edges, deferral))
