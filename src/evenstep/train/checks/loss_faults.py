"""What is said about a loss that is no sum over its micro-batch, and about what else depends on how batches are cut.

Each sentence says what was found, with both numbers, what must be, and the change to make. What was found is told apart
in `additive`.
"""

import math
from collections.abc import Mapping, Sequence

from torch import nn

from evenstep.arguments import first_of
from evenstep.internals import has_gradient_hooks
from evenstep.parallel.buffers import is_batch_norm
from evenstep.train.checks.additive import Kind, LossValue, equal
from evenstep.train.tasks.task import Task

AS_IT_IS = "`train=Training(check_loss=False)`, in a run file `train.check_loss = false`"


def loss_fault(kind: Kind, size: float, task: Task, where: str, whole: LossValue, parts: Sequence[LossValue]) -> str:
    """What is wrong with a loss that does not add up.

    Args:
        size: of the term that is counted once per batch.
        where: "micro-batch 0 (16 samples)".
    """
    loss = f"`{type(task).__name__}.loss`"
    total = math.fsum(part.loss for part in parts)
    found = f"the loss of {where} is {whole.loss:.4g}, but the losses of its {_counted(parts)} add up to {total:.4g}"
    if kind == "mean":
        return (
            f"{found}: {loss} gives a mean, and must give the sum over its units, which the update divides by their "
            f'weight. Return `F.cross_entropy(..., reduction="sum")`, or `Loss.of_mean(mean, count)` with the number '
            f"of units that the mean is over. If it is meant as it is: {AS_IT_IS}."
        )
    if kind == "term":
        return (
            f"{found}: {loss} adds {-size if size < 0 else size:.4g} once for each batch, whatever is in it (a penalty "
            f"on weights?), so that it counts more the finer batches are cut. Multiply that term by the number of "
            f"units that `weight` gives for the batch. If it is meant as it is: {AS_IT_IS}."
        )
    if _is_sum_for_mean(whole, parts):
        return (
            f"{found}: {loss} gives as a mean what is a sum, so that it is multiplied by the number of units once "
            f"more. Give their mean; a task of your own may return the sum as it is, `Loss(total)`."
        )
    classes = (
        " (where classes have weights, that is what `Loss.of_mean` and `weight` must count: `weights[labels].sum()`)"
        if whole.count is not None
        else ""
    )
    return (
        f"{found}: what {loss} gives depends on the micro-batch as a whole (samples compared with each other, such as "
        f"negatives of the same batch; a statistic of the batch), so it is another loss for every cut and number of "
        f"ranks. Sum what each sample gives by itself{classes}; if it is meant over a micro-batch as a whole: "
        f"{AS_IT_IS}."
    )


def _is_sum_for_mean(whole: LossValue, parts: Sequence[LossValue]) -> bool:
    """Whether what was said to be means, each over its count, adds up as sums do."""
    means = [one.loss / one.count for one in (whole, *parts) if one.count]
    return len(means) == 1 + len(parts) and math.isclose(means[0], math.fsum(means[1:]), rel_tol=1e-3)


def weight_fault(task: Task, where: str, whole: LossValue, parts: Sequence[LossValue]) -> str:
    """What is wrong with weights that don't add up, or that are not what the loss has counted; "" if nothing."""
    name, loss = f"`{type(task).__name__}.weight`", f"`{type(task).__name__}.loss`"
    if task.reduction == "sum":
        return ""  # nothing is divided by it
    total = math.fsum(part.weight for part in parts)
    if not equal(total, whole.weight):
        each = " + ".join(f"{part.weight:g}" for part in parts)
        if task.late_weight:
            name = f"the weight that {loss} gives"
        return (
            f"the weight of {where} is {whole.weight:g}, but the weights of its {_counted(parts)} are {each}: {name} "
            f"must count the units that the summed loss covers (samples, tokens that are no padding), which add up "
            f"however a batch is cut. Count them, for instance `(labels != -100).sum()`; where "
            f"`{type(task).__name__}.split` cuts batches, it must leave out none and repeat none. If it is meant as it "
            f"is: {AS_IT_IS}."
        )
    if whole.count is not None and not task.late_weight and not equal(whole.count, whole.weight):
        return (
            f"the loss of {where} is a mean over {whole.count:g} units (`Loss.of_mean`), but {name} gives "
            f"{whole.weight:g} for it, which the sum is divided by: let `weight` count the same units, from the batch, "
            f"or set `late_weight = True`, and the count is the weight."
        )
    return ""


def weightless_fault(task: Task, where: str, loss: float) -> str:
    """What is wrong with a micro-batch that weighs nothing and is left out, but has a loss."""
    kind = type(task).__name__
    advice = (
        "Let `weight` count all that the loss covers, such as samples, or set `late_weight = True` and return "
        "`Loss(total, weight=count)`: then it is run."
        if task.reduction == "weight"
        else "Let `weight` give more than 0 for each batch that has a loss: then it is run."
    )
    return (
        f"the weight of {where} is 0, so it is not run, but its loss is {loss:.4g}: `{kind}.loss` covers samples that "
        f"`{kind}.weight` does not count (images without boxes?), which would have a part in the update only where "
        f"they share a micro-batch with others. {advice} If it is meant as it is: {AS_IT_IS}."
    )


def metric_note(task: Task, weights: Mapping[str, float]) -> str:
    """Metrics that are given as means, each with the weight that it has whatever the batch."""
    listed = ", ".join(f"`{name}`" for name in weights)
    alike = {*weights.values()} == {1.0}
    given = (
        "as (mean, 1)"
        if alike
        else f"with weight {' and '.join(f'{one:g}' for one in weights.values())} for a whole batch and for its halves"
    )
    advice = "" if alike else " (where a LightningModule logs it: leave `batch_size=` out, or give that of the batch)"
    return (
        f"`{type(task).__name__}.loss` gives the metric{'s' if len(weights) > 1 else ''} {listed} {given}, which is "
        f"logged as a mean over micro-batches, another for every cut; give (sum, weight), such as (correct, total)"
        f"{advice}."
    )


def sum_note(task: Task, values: Mapping[str, float]) -> str:
    """Metrics that are sums, given as means, each with its value."""
    name, value = next(iter(values.items()))
    others = "".join(f", as is `{other}`" for other in values if other != name)
    return (
        f"`{type(task).__name__}.loss` gives the metric `{name}` as a mean, but it is a sum: {value:.4g} is what those "
        f"of the two halves of a batch add up to{others}. So what is logged goes by the size of the micro-batches; "
        f"give (sum, weight), and where a LightningModule logs it, the mean."
    )


def unlike_note(task: Task, names: Sequence[str], whole: LossValue, parts: Sequence[LossValue]) -> str:
    """Metrics of which halves do not give together what the whole does."""
    name = names[0]
    apart = " and ".join(_pair(part.metrics[name]) for part in parts)
    others = "".join(f", and so with `{other}`" for other in names[1:])
    return (
        f"`{type(task).__name__}.loss` gives the metric `{name}` as {_pair(whole.metrics[name])} for a batch, but as "
        f"{apart} for its halves, which have another mean together{others}. So what is logged is another number for "
        f"every cut; give sums over samples, such as (correct, total), and make what is computed of sums by `derived` "
        f"and `Loss.counts`, or give an object of torchmetrics as one of the task's `metrics`."
    )


def _pair(given: tuple[float, float]) -> str:
    total, weight = given
    return f"({total:.4g}, {weight:g})"


def uncut_note(task: Task, why: str) -> str:
    """Batches that can't be cut in two."""
    kind = type(task).__name__
    return (
        f"a micro-batch of `{kind}` can't be cut in two: {why}. So its loss is not checked, and one that does not fit "
        f"into memory will stop the run; say how it is cut in `{kind}.split`."
    )


def unchecked_note(task: Task, reason: str) -> str:
    """A loss that can't be had where it is looked at, though updates have it."""
    loss = f"{type(task).__name__}.loss"
    return (
        f"`{loss}` could not be compared with the losses of halves: in evaluation mode, in which that is done, it "
        f"raised {reason}. So nobody has seen whether it is a sum. Compare one update of a batch with one of its "
        f"halves by hand, as docs/faq.md shows, and say `{AS_IT_IS.split('`')[1]}`."
    )


def norm_note(names: Sequence[str]) -> str:
    """Layers that normalise a micro-batch by itself."""
    return (
        f"{_first(names)} normalise{_s(names)} each micro-batch by its own statistics (BatchNorm), so the "
        f'parameters depend on how batches are cut; GroupNorm, or `norm_statistics="frozen"` '
        f"(`train.norm_statistics` in a run file), does not."
    )


def hook_note(names: Sequence[str]) -> str:
    """Parameters whose gradients somebody changes in the backward of each micro-batch."""
    return (
        f"{_first(names)} {'have' if len(names) > 1 else 'has'} a hook (`register_hook`), which gets the gradient of "
        f"each micro-batch by itself: a mask or a factor is the same in every cut, but with anything else, as "
        f"clipping, a norm or noise, the parameters depend on how batches are cut; clip by `clip_norm`, or change the "
        f"gradient of the update in a `Hook`'s `before_step`."
    )


def hooked(model: nn.Module) -> list[str]:
    """The names of parameters that have such hooks of the user's."""
    return [name for name, one in model.named_parameters() if has_gradient_hooks(one)]


def frequency_note(names: Sequence[str]) -> str:
    """Embeddings that divide the gradient of a row by how often it is in a micro-batch."""
    return (
        f"{_first(names)} divide{_s(names)} the gradient of a row by how often it is in the micro-batch "
        f"(`scale_grad_by_freq`), so the parameters depend on how batches are cut; without it, they do not."
    )


def by_frequency(model: nn.Module) -> list[str]:
    """The names of such embeddings."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return [name for name, one in model.named_modules() if isinstance(one, kinds) and one.scale_grad_by_freq]


def batch_norms(model: nn.Module, *, always: bool = False) -> list[str]:
    """The names of layers that normalise by the statistics of a micro-batch: while training, or `always`."""
    norms = [(name, one) for name, one in model.named_modules() if is_batch_norm(one)]
    return [name for name, one in norms if (one.running_mean is None if always else one.training)]


def _counted(parts: Sequence[LossValue]) -> str:
    return "two halves" if len(parts) == 2 else f"{len(parts)} parts"


def _first(names: Sequence[str]) -> str:
    return first_of([f"`{name}`" for name in names], 1)


def _s(names: Sequence[str]) -> str:
    """The ending of a verb whose subject they are."""
    return "" if len(names) > 1 else "s"
