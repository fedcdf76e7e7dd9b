"""Normalisation layers whose running statistics are frozen: used in training as in evaluation, and never moved."""

from torch import nn

from evenstep.parallel.buffers import is_norm

_FROZEN = "`train=Training(norm_statistics='frozen')`, in a run file `train.norm_statistics = \"frozen\"`"


def explain(error: Exception, *, cut: bool = False) -> None:
    """Add to torch's refusal of a batch with one value per channel where such a batch comes from, and what to do.

    Args:
        cut: whether it is a part of a micro-batch that did not fit into memory.
    """
    if "Expected more than 1 value per channel" not in str(error):
        return
    if cut:
        error.add_note(
            "The micro-batch did not fit into memory, so it was cut, and a part of one sample has no statistics of its "
            "own. If two samples fit, choose `micro_batch_size` 2 and `global_batch_size` a multiple of it; else need "
            "less memory (`memory.checkpoint`, a precision of 16 bits), or normalise by the running statistics "
            f"({_FROZEN})."
        )
    else:
        error.add_note(
            "A micro-batch of one sample has no statistics of its own: choose `global_batch_size` and "
            "`micro_batch_size` so that no sample is left alone, leave one out (`torch.utils.data.Subset`), or "
            f"normalise by the running statistics ({_FROZEN})."
        )


def frozen_norms(model: nn.Module) -> tuple[nn.Module, ...]:
    """The layers with running statistics, which `norm_statistics = "frozen"` keeps in evaluation mode.

    >>> [type(layer).__name__ for layer in frozen_norms(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))]
    ['BatchNorm1d']
    """
    return tuple(one for one in model.modules() if is_norm(one) and getattr(one, "running_mean", None) is not None)
