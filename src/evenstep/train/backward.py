"""The way back from one loss through the autograd engine.

`torch.autograd.backward` first looks at the gradient it is given: its shape with symbolic sizes, its dtype, whether it
is complex. Here that gradient was made like the loss, and looking at it costs as much as three small kernels, so the
engine is called where `backward` itself, and torch's pipelining runtime, call it.
"""

from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from evenstep.internals import run_backward


def backward_of(loss: Tensor, gradient: Tensor) -> None:
    """Add to every parameter's `.grad` the gradient of `loss` times `gradient`; the graph is freed.

    Args:
        loss: 0-dim, with a graph.
        gradient: what the way back begins with, made like the loss.

    >>> import torch
    >>> w = torch.tensor(3.0, requires_grad=True)
    >>> backward_of(w * w, torch.tensor(0.5))
    >>> w.grad
    tensor(3.)
    """
    try:
        run_backward(loss, gradient)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            error.add_note(
                "evenstep goes back from the loss itself: `Task.loss` must not call `backward`, and what it computes "
                "from must be of this micro-batch's forward, not kept from an earlier one."
            )
        if isinstance(error, CheckpointError):
            error.add_note(
                "A module's forward has computed something else when it was computed again in the backward: it may "
                "depend on what it keeps in attributes, or in a cache that it is given, as models of transformers do "
                "unless `Task.inputs` gives them `use_cache=False`. Let `memory.checkpoint`, or a checkpoint of the "
                "model's own, leave it out, or let it keep nothing."
            )
        raise
