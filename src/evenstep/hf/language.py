"""Language models: the next token of a decoder, and the tokens that an encoder-decoder gives for others.

A token t with label y_t ≥ 0 and weight w_t (1 by default) adds to the loss and to the batch's weight

    S = Σ_t w_t · (−log p_t(y_t)),      w = Σ_t w_t

so that an update divides once by all its tokens, however they came in batches. The model never gets the labels, and its
own loss, which is a mean, is not used.
"""

from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.errors import ArgumentError, TaskError
from evenstep.hf.causal import check_causal
from evenstep.hf.columns import IGNORED
from evenstep.hf.documents import check_documents, halves_of_row, restarts
from evenstep.hf.head import ChunkedHead
from evenstep.hf.outputs import (
    batch_of,
    check_whole,
    logits_of,
    prompt_tokens,
    tensor_of,
    weights_of,
)
from evenstep.train import Loss, Task

_NOT_FOR_THE_MODEL = ("labels", "weights")


class _Tokens(Task):
    unit = "tokens"

    def __init__(self, *, label_smoothing: float, chunked: bool) -> None:
        if chunked and label_smoothing:
            raise ArgumentError("`label_smoothing` does not go with `chunked`; leave one of them out.")
        self._label_smoothing = float(label_smoothing)
        self._head = ChunkedHead() if chunked else None

    def prepare(self, model: nn.Module) -> None:
        check_whole(self, model)
        if self._head is not None:
            self._head.attach(model)

    def inputs(self, batch: Any) -> dict[str, Any]:
        given = batch_of(self, batch)
        if self._head is not None and "labels" in given:
            self._head.expect(*self._counted(given))
        return {"use_cache": False, **{name: one for name, one in given.items() if name not in _NOT_FOR_THE_MODEL}}

    def weight(self, batch: Any) -> Tensor:
        given = batch_of(self, batch)
        targets, weights = self._counted(given)
        counts = targets != IGNORED
        return counts.sum() if weights is None else weights.double().mul(counts).sum()

    def loss(self, output: Any, batch: Any) -> Loss:
        logits = logits_of(self, output)
        if self._head is not None:
            return Loss(self._head.loss_in(logits))
        targets, weights = self._counted(batch_of(self, batch))
        if logits.shape[:-1] != targets.shape:
            raise TaskError(
                f"the model gives logits of shape {list(logits.shape)} for labels of shape {list(targets.shape)}; "
                f"{type(self).__name__} needs one row of scores for each label."
            )
        losses = functional.cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self._label_smoothing,
            reduction="sum" if weights is None else "none",
        )
        return Loss(losses if weights is None else losses.mul(weights.flatten()).sum())

    def predict(self, output: Any, batch: Any) -> Tensor:
        return logits_of(self, output)

    def _counted(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _labels(self, batch: Mapping[str, Any], advice: str) -> tuple[Tensor, Tensor | None]:
        labels = tensor_of(self, batch, "labels", advice)
        if labels.ndim != 2:
            raise TaskError(f"`labels` must be of shape [rows, length], but are of shape {list(labels.shape)}.")
        return labels, weights_of(self, batch, labels)


class CausalLM(_Tokens):
    """The next token, for decoders such as Llama: the scores at place t are for the label at place t + 1.

    Batches are mappings, as tokenizers, data collators and `Packing` make them. All in them is given to the model by
    its name, but `labels` `[rows, length]` (−100 is not counted) and, if there are some, `weights` `[rows, length]`, of
    the labels beside them. Not counted are also the first token of a packed document, and a token after
    padding: nothing is there to tell them from.

    Args:
        packed: whether rows hold several documents, which `position_ids` that begin anew tell apart. It is tried,
            before anything is trained, that the model lets none see another.
        chunked: whether scores are made, and made again in the backward, for some tokens at a time, so that they are
            never in memory all at once; for models whose scores are those of one linear layer.
        label_smoothing: ε: the target is (1 − ε) on the label and ε spread evenly over the vocabulary.

    Raises:
        ArgumentError: choices that do not go together; later, a model that can't be trained so.

    >>> import torch
    >>> task = CausalLM()
    >>> batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[-100, 6, 7]])}
    >>> int(task.weight(batch)), sorted(task.inputs(batch))
    (2, ['input_ids', 'use_cache'])
    """

    def __init__(self, *, packed: bool = False, chunked: bool = False, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing, chunked=chunked)
        self._packed = packed
        self._prompt = 0

    def prepare(self, model: nn.Module) -> None:
        self._prompt = prompt_tokens(model)
        super().prepare(model)
        check_causal(model)
        if self._packed:
            check_documents(model)

    def weight(self, batch: Any) -> Tensor:
        self._check_row(batch_of(self, batch))
        return super().weight(batch)

    def predict(self, output: Any, batch: Any) -> Tensor:
        """The scores, without those of a learned prompt."""
        return super().predict(output, batch)[:, self._prompt :]

    def split(self, batch: Any) -> list[Any]:
        """In two by rows; a row of several documents between two of them."""
        return (halves_of_row(batch) if self._packed else None) or super().split(batch)

    def _counted(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        labels, weights = self._labels(batch, "give the tokens to learn, −100 where there is none: a copy of them.")
        counted = labels != IGNORED
        if (mask := _mask_of(batch)) is not None:
            counted = counted & functional.pad(mask[:, :-1] != 0, (1, 0), value=self._prompt > 0)
        if (positions := batch.get("position_ids")) is not None:
            counted = counted & ~restarts(positions, mask)
        # scores are for what comes next, and a learned prompt has scores too: its last are for the first token
        shift = (self._prompt - 1, 1)
        targets = functional.pad(labels.masked_fill(~counted, IGNORED), shift, value=IGNORED)
        return targets, None if weights is None else functional.pad(weights, shift)

    def _check_row(self, batch: Mapping[str, Any]) -> None:
        positions, mask = batch.get("position_ids"), _mask_of(batch)
        if positions is None or not bool(restarts(positions, mask).any()):
            return
        if not self._packed:
            raise TaskError("a row holds several documents (`position_ids` restart); write `CausalLM(packed=True)`.")
        if batch.get("attention_mask") is not None:
            raise TaskError("a row of several documents must come without `attention_mask`, or they see each other.")


def _mask_of(batch: Mapping[str, Any]) -> Tensor | None:
    mask: Any = batch.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


class Seq2Seq(_Tokens):
    """The tokens that an encoder-decoder such as T5 or BART gives for others: the scores at place t are for label t.

    Batches are mappings. All in them is given to the model by its name, but `labels` `[rows, length]` (−100 is not
    counted) and, if there are some, their `weights`. Without `decoder_input_ids` the decoder gets the labels one place
    further right, as the model's `prepare_decoder_input_ids_from_labels` puts them (MBart begins with the label that
    is last), else after its `decoder_start_token_id`.

    Args:
        chunked, label_smoothing: see `CausalLM`.

    Raises:
        ArgumentError: choices that do not go together; later, a model that can't be trained so.
    """

    def __init__(self, *, chunked: bool = False, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing, chunked=chunked)
        self._begin, self._pad = None, None
        self._model: ref[nn.Module] | None = None

    def prepare(self, model: nn.Module) -> None:
        config = getattr(model, "config", None)
        self._model = ref(model)  # it is not the task's
        self._begin = getattr(config, "decoder_start_token_id", None)
        self._pad = getattr(config, "pad_token_id", None)
        super().prepare(model)

    def inputs(self, batch: Any) -> dict[str, Any]:
        given = super().inputs(batch)
        if "decoder_input_ids" not in given and "labels" in batch:
            given["decoder_input_ids"] = self._shifted(batch["labels"])
        return given

    def _shifted(self, labels: Tensor) -> Tensor:
        own: Any = getattr(self._model and self._model(), "prepare_decoder_input_ids_from_labels", None)
        if self._pad is not None and own is not None:
            try:
                return own(labels)
            except (AttributeError, TypeError, ValueError):  # of one that begins with a token that the config lacks
                if self._begin is not None:
                    raise
        if self._begin is None or self._pad is None:
            raise TaskError("the model's config needs `decoder_start_token_id` and `pad_token_id`; set them.")
        begin = labels.new_full((len(labels), 1), self._begin)
        return torch.cat([begin, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self._pad)], 1)

    def _counted(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        return self._labels(batch, "give the tokens that are to be given, −100 where there is none.")
