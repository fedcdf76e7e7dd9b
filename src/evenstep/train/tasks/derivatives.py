"""Losses that take derivatives themselves: penalties on gradients, residuals of equations, inner steps.

They need a graph wherever they are computed, also where the engine makes none: in evaluations. Torch computes their
gradients, which are second derivatives, of no compiled model. The engine knows both errors, and says what to do.
"""

import torch

from evenstep.train.tasks.now import is_checking_losses


def takes_derivatives(error: Exception) -> bool:
    """Whether torch has raised `error` because a derivative was asked for where no graph is made.

    >>> error = RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    >>> with torch.no_grad(): takes_derivatives(error)
    True
    """
    return not torch.is_grad_enabled() and isinstance(error, RuntimeError) and "not require grad" in str(error)


def explain_derivatives(error: Exception) -> None:
    """Add to such an error what to do: how a loss of derivatives is evaluated, or that it can't be compiled.

    >>> error = RuntimeError("torch.compile with aot_autograd does not currently support double backward")
    >>> explain_derivatives(error); error.__notes__[0][:44]
    'What is compiled has derivatives of first or'
    >>> from evenstep.train.tasks.now import checking_losses
    >>> error = RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    >>> with torch.no_grad(), checking_losses(): explain_derivatives(error)
    >>> error.__notes__[0].partition(": ")[2]
    'use `ddp` or `zero1`, not `fsdp` or stages.'
    """
    if takes_derivatives(error) and is_checking_losses():  # which is made once more with a graph where one can be had
        error.add_note(
            "A loss that takes derivatives of what the model gives needs parameters that are whole: use `ddp` or "
            "`zero1`, not `fsdp` or stages."
        )
    elif takes_derivatives(error):
        error.add_note(
            "Evaluations make no graph, so a loss that takes derivatives can't be had there as in training. Let the "
            "task evaluate with one: `def evaluate(self, model, batch):`, and in it `with torch.enable_grad(): return "
            "super().evaluate(model, batch)`."
        )
    elif "support double backward" in str(error):
        error.add_note(
            "What is compiled has derivatives of first order only, and here the loss takes some itself. Set `compile` "
            "to 'off' (`train.compile` in a run file)."
        )
