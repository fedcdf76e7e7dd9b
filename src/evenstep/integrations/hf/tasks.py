"""Tasks for models of `transformers`: language models, encoder-decoders, classification.

The model never gets the labels: its own loss is a mean. A token or row with label y and weight w (1 by default) adds
w · (−log p(y)) to the loss and w to the batch's weight. The label −100 is not counted.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.errors import ArgumentError, TaskError
from evenstep.train import Loss, Task, chunked_cross_entropy
from evenstep.train.forwards import evaluating

IGNORED = -100  # label that is not counted
_FIRST = 4  # tokens of the first document of a trial, of 9
Problem = Literal["single_label", "multi_label", "regression"]


class _Labelled(Task):
    """A task whose batches have `labels` and perhaps `weights` of their shape."""

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {name: one for name, one in batch.items() if name not in ("labels", "weights")}

    def predict(self, output: Any, batch: Any) -> Tensor:
        return self._logits(output)

    def _logits(self, output: Any) -> Tensor:
        """Scores of the model, in float32 at least."""
        logits: Any = output["logits"] if isinstance(output, Mapping) else output
        if isinstance(logits, tuple | list):
            logits = cast("Any", logits)[0]
        return logits.float() if logits.itemsize < 4 else logits


def _weight(counts: Tensor, weights: Tensor | None) -> Tensor:
    return counts.sum() if weights is None else weights.double().mul(counts).sum()


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses if weights is None else losses.flatten().mul(weights.flatten()).sum()


def _cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
    losses = functional.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
        reduction="sum" if weights is None else "none",
    )
    return _weighted(losses, weights)


class _Tokens(_Labelled):
    unit = "tokens"

    def __init__(self, *, label_smoothing: float, chunked: bool) -> None:
        if chunked and label_smoothing:
            raise ArgumentError(
                "`label_smoothing` does not go with `chunked`; leave one of them out.", field="label_smoothing"
            )
        self._label_smoothing = float(label_smoothing)
        self._chunked = chunked
        self._expected: tuple[Tensor, Tensor | None] | None = None  # targets that the head of the next forward takes
        self._sum: Tensor | None = None  # of losses, which the head gave in place of scores

    def prepare(self, model: nn.Module) -> None:
        if self._chunked:
            asked: Any = getattr(model, "get_output_embeddings", None)
            head = None if asked is None else asked()
            if type(head) is not nn.Linear:
                raise ArgumentError(
                    f"`chunked` needs a model whose head is one `nn.Linear`, not that of {type(model).__name__}.",
                    field="chunked",
                )
            head.forward = partial(self._run_head, head)

    def _run_head(self, head: nn.Linear, input: Tensor) -> Tensor:
        if self._expected is None:
            return nn.Linear.forward(head, input)
        targets, weights = self._expected
        self._expected = None
        # within the model's forward, where shards are whole
        self._sum = chunked_cross_entropy(input, head.weight, targets, bias=head.bias, weights=weights)
        return self._sum

    def inputs(self, batch: Any) -> dict[str, Any]:
        given = super().inputs(batch)
        if self._chunked and "labels" in batch:
            self._expected = self._counted(batch)
        return {"use_cache": False, **given}

    def weight(self, batch: Any) -> Tensor:
        targets, weights = self._counted(batch)
        return _weight(targets != IGNORED, weights)

    def loss(self, output: Any, batch: Any) -> Loss:
        logits = self._logits(output)
        if self._chunked:
            if logits is not self._sum:
                raise TaskError(
                    "`chunked` needs the unchanged scores of the model's head, but it changes them; leave it out.",
                    field="chunked",
                )
            self._sum = None
            return Loss(logits)
        targets, weights = self._counted(batch)
        return Loss(_cross_entropy(logits, targets, weights, self._label_smoothing))

    def _counted(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Target of each place, −100 where none is counted, and the targets' weights."""
        return batch["labels"], batch.get("weights")


class CausalLM(_Tokens):
    """The next token, for decoders such as Llama: the scores at place t are for the label at place t + 1.

    `labels` and `weights` are of shape `[rows, length]`. Not counted are labels of −100, the first token of a packed
    document, and a token after padding: no token stands before them.

    Args:
        packed: rows hold several documents, which `position_ids` that begin anew tell apart.
        chunked: scores are never in memory all at once; for models whose scores are those of one linear layer.
        label_smoothing: ε: the target is (1 − ε) on the label and ε spread evenly over the vocabulary.
    """

    def __init__(self, *, packed: bool = False, chunked: bool = False, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing, chunked=chunked)
        self._packed = packed

    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        _check_causal(model)
        if self._packed:
            _check_documents(model)

    def weight(self, batch: Any) -> Tensor:
        restarts = _restarts(batch)
        unclear = not self._packed or batch.get("attention_mask") is not None
        if restarts is not None and unclear and bool(restarts.any()):
            raise TaskError(
                "a row of several documents (`position_ids` restart) needs `CausalLM(packed=True)` and no "
                "`attention_mask`, or they see each other.",
                field="packed",
            )
        return super().weight(batch)

    def _counted(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        labels, weights = super()._counted(batch)
        counted = labels != IGNORED
        follows = _follows_token(batch)
        if follows is not None:
            counted = counted & follows
        restarts = _restarts(batch)
        if restarts is not None:
            counted = counted & ~restarts
        shift = (-1, 1)
        targets = functional.pad(labels.masked_fill(~counted, IGNORED), shift, value=IGNORED)
        return targets, None if weights is None else functional.pad(weights, shift)


def _restarts(batch: Mapping[str, Any]) -> Tensor | None:
    """Places `[rows, length]` where a document begins that is not the first of its row; after padding none does."""
    positions = batch.get("position_ids")
    if positions is None:
        return None
    begins = functional.pad(positions[:, 1:] == 0, (1, 0))
    follows = _follows_token(batch)
    return begins if follows is None else begins & follows


def _follows_token(batch: Mapping[str, Any]) -> Tensor | None:
    """Places `[rows, length]` right after a token that is no padding; None without a mask."""
    mask: Any = batch.get("attention_mask")
    return functional.pad(mask[:, :-1] != 0, (1, 0)) if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _scores(model: nn.Module, ids: Tensor, **given: Tensor) -> Tensor:
    more: dict[str, Any] = {name: one.unsqueeze(0) for name, one in given.items()}
    output: Any = model(input_ids=ids.unsqueeze(0), use_cache=False, **more)
    return cast(Tensor, output["logits"])[0].double()


def _check_causal(model: nn.Module) -> None:
    """Raise ArgumentError for a model of tokens whose scores at a place depend on later tokens."""
    try:
        weight = cast("Any", model).get_input_embeddings().weight
        tokens = (torch.arange(8, device=weight.device) * 7 + 3) % len(weight)
        other = tokens.clone()
        other[-1] = (tokens[-1] + 1) % len(weight)
        with evaluating(model, weight.device):
            one = _scores(model, tokens)[:-1]
            beside = _scores(model, other)[:-1]
    except Exception:  # noqa: BLE001 - models in stages, of images, or with inputs beside tokens that are unknown here
        return
    moved = float((one - beside).abs().max())
    # experts take their tokens together, so rounding may differ; a token that is seen differs by far more
    if moved > torch.finfo(weight.dtype).eps ** 0.75 * float(one.abs().max()):
        raise ArgumentError(
            f"`CausalLM` needs scores that depend on earlier tokens alone, but a later token changes the scores of "
            f"{type(model).__name__} by {moved:.2g}; build it as a decoder (`config.is_decoder = True`).",
            field="model",
        )


def _check_documents(model: nn.Module) -> None:
    """Raise ArgumentError for a model in which one document of a row moves the scores of another."""
    weight = cast("Any", model).get_input_embeddings().weight
    tokens = torch.arange(9, device=weight.device) * 7 % len(weight)
    other = tokens.clone()
    other[:_FIRST] = (tokens[:_FIRST] + 3) % len(weight)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4], device=weight.device)
    with evaluating(model, weight.device):
        one = _scores(model, tokens, position_ids=positions)[_FIRST:]
        beside = _scores(model, other, position_ids=positions)[_FIRST:]
    moved = float((one - beside).abs().max())
    if moved > 4 * torch.finfo(weight.dtype).eps * float(one.abs().max()):
        raise ArgumentError(
            f"`packed` needs a model that keeps the documents of a row apart, but in {type(model).__name__} one moves "
            f"the scores of another by {moved:.2g}; try `attn_implementation='sdpa'`.",
            field="packed",
        )


class Seq2Seq(_Tokens):
    """The tokens that an encoder-decoder such as T5 or BART gives for others: the scores at place t are for label t.

    `labels` and `weights` are of shape `[rows, length]`. Without `decoder_input_ids` the decoder gets the labels one
    place further right, by the model's `prepare_decoder_input_ids_from_labels`.

    Args:
        chunked, label_smoothing: see `CausalLM`.
    """

    def __init__(self, *, chunked: bool = False, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing, chunked=chunked)
        self._model: ref[nn.Module] | None = None

    def prepare(self, model: nn.Module) -> None:
        self._model = ref(model)  # the task does not own it
        super().prepare(model)

    def inputs(self, batch: Any) -> dict[str, Any]:
        given = super().inputs(batch)
        if "decoder_input_ids" not in given and "labels" in batch:
            model = cast("Any", self._model)()
            given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        return given


class Classification(_Labelled):
    """One class, several labels or numbers, for models with a classification head.

    | `problem` | `labels` | loss, summed over labels |
    |---|---|---|
    | single_label | whole numbers `[rows]`, or `[rows, length]` for tokens; −100 is not counted | −log p(label) |
    | multi_label | 0 and 1 `[rows, classes]` | −Σ_c log p_c(label_c), each class by itself |
    | regression | numbers `[rows]` or `[rows, outputs]` | Σ (output − label)² |

    Single labels also give the metric `accuracy`.

    Args:
        problem: one of them; the model's `config.problem_type` is not read.
        label_smoothing: ε: the target of a single label is (1 − ε) on it and ε spread evenly over the classes.
    """

    def __init__(self, *, problem: Problem = "single_label", label_smoothing: float = 0.0) -> None:
        if label_smoothing and problem != "single_label":
            raise ArgumentError("`label_smoothing` is for single labels; leave it out.", field="label_smoothing")
        self._problem = problem
        self._label_smoothing = float(label_smoothing)

    def weight(self, batch: Any) -> Tensor:
        labels = batch["labels"]
        counts = labels != IGNORED if self._problem == "single_label" else torch.ones_like(labels, dtype=torch.bool)
        return _weight(counts, batch.get("weights"))

    def loss(self, output: Any, batch: Any) -> Loss:
        logits = self._logits(output)
        labels: Tensor = batch["labels"]
        weights: Tensor | None = batch.get("weights")
        if self._problem == "regression" and logits.shape == (*labels.shape, 1):
            labels = labels.unsqueeze(-1)
        wanted = logits.shape[:-1] if self._problem == "single_label" else logits.shape
        if labels.shape != wanted:
            raise TaskError(
                f"`labels` must be of shape {list(wanted)} for `{self._problem}`, but are of shape "
                f"{list(labels.shape)}; choose another `problem` or head.",
                field="labels",
            )
        if self._problem == "single_label":
            counts = labels != IGNORED
            right = (logits.argmax(-1) == labels) & counts
            total = _cross_entropy(logits, labels, weights, self._label_smoothing)
            return Loss(total, metrics={"accuracy": (right.sum(), counts.sum())})
        is_numbers = self._problem == "regression"
        function = functional.mse_loss if is_numbers else functional.binary_cross_entropy_with_logits
        reduction = "sum" if weights is None else "none"
        return Loss(_weighted(function(logits, labels.to(logits.dtype), reduction=reduction), weights))
