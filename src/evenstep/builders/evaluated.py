"""The weights that a run has evaluated, where its optimizer trains others (schedule-free ones), out of a checkpoint.

Only the optimizer can make them of the trained ones and of its state; so the run's model and optimizer are built as for
the run, get what was saved, and are put into the mode of evaluations. No data are needed, and nothing is trained.
"""

from pathlib import Path

from torch import nn

from evenstep.builders.parts import make_model, make_optimizer, prepared
from evenstep.builders.pipeline import build_model
from evenstep.checkpoint import read_checkpoint
from evenstep.checkpoint.weights import StoredWeights, own_weights
from evenstep.config.named import OpenRun
from evenstep.optim.modes import Modes
from evenstep.tensors import load_state
from evenstep.train.state.optimizer_state import check_optimizer, load_optimizer, options_of
from evenstep.train.state.train_state import parameter_names


def evaluated_weights(run: OpenRun, path: Path | str) -> StoredWeights:
    """The weights at `path` as the run's optimizer evaluates them, on the CPU.

    Args:
        path: a checkpoint of the run, or its folder, whose newest is taken.

    Raises:
        CheckpointError: what was saved is not that of this model and optimizer, or can't be read.
    """
    reader = read_checkpoint(path)
    made = make_model(run)
    # Layers that a run trains in stages are put together: all of them, since there is one process.
    model = made if isinstance(made, nn.Module) else build_model(run.config, made, None)
    prepared(run, model)
    optimizer = make_optimizer(run, model)
    groups = parameter_names(model, optimizer)
    saved = reader.state["optimizer"]
    check_optimizer(saved, optimizer, groups)
    load_state(model, reader.state["model"])
    load_optimizer(saved, optimizer, groups, options_of(optimizer))
    Modes(optimizer, (), fetch=lambda: None).evaluate()
    held = own_weights(model.state_dict(keep_vars=True))  # the tensors themselves: tied ones are one object
    return StoredWeights(
        source=f"{reader.path}, as evaluated",
        outlines=held,
        read=lambda name: held[name].detach(),
        verify=lambda: None,
    )
