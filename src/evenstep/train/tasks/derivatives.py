"""Losses that take derivatives themselves: penalties on gradients, residuals of equations, inner steps.

They need a graph wherever they are computed, also where the engine makes none: in evaluations. It knows such an error,
and says what to do about it.
"""

import torch


def takes_derivatives(error: Exception) -> bool:
    """Whether torch has raised `error` because a derivative was asked for where no graph is made.

    >>> error = RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    >>> with torch.no_grad(): takes_derivatives(error)
    True
    """
    return not torch.is_grad_enabled() and isinstance(error, RuntimeError) and "not require grad" in str(error)


def explain_derivatives(error: Exception) -> None:
    """Add to such an error how a loss of derivatives is evaluated."""
    if takes_derivatives(error):
        error.add_note(
            "Evaluations make no graph, so a loss that takes derivatives can't be had there as in training. Let the "
            "task evaluate with one: `def evaluate(self, model, batch):`, and in it `with torch.enable_grad(): return "
            "super().evaluate(model, batch)`."
        )
