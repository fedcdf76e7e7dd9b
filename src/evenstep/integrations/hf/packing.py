"""Rows of whole documents: a micro-batch's samples one after the other instead of each beside its padding.

Samples stay samples: order, global batches and resumes are those of the same data unpacked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn import functional

from evenstep.data.batching import pack
from evenstep.errors import DataError

_IGNORED = -100


@final
class Packing:
    """A collate function: rows of documents, with `position_ids` that begin anew at each.

    Documents are put, longest first, into the first row that has room for them ("first-fit decreasing", Johnson 1973).
    Samples are lists of tokens, or mappings with `input_ids` and perhaps `labels` (the tokens themselves by default)
    and `weights`, one for each token. Use it with `CausalLM(packed=True)`.

    Args:
        max_tokens: the most tokens of a row; None for one row of all samples, without any padding.
        fixed: rows are padded to `max_tokens`, so that all have one shape; else to the longest of the batch.
        pad_token_id: token of the padding, a document of its own that is not counted.

    >>> batch = Packing(max_tokens=4)([[5, 6], [7, 8, 9], [4]])
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
    ([[7, 8, 9, 4], [5, 6, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 1]])
    """

    def __init__(self, *, max_tokens: int | None = None, fixed: bool = False, pad_token_id: int = 0) -> None:
        self._max_tokens = max_tokens
        self._fixed = fixed
        self._padding = {"input_ids": pad_token_id, "labels": _IGNORED, "weights": 0.0}

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Batch of samples, `[rows, length]`; DataError for a document that is longer than a row."""
        documents = [_document(sample, number) for number, sample in enumerate(samples)]
        lengths = [len(document["input_ids"]) for document in documents]
        rows = rows_of(lengths, self._max_tokens)
        sizes = [sum(lengths[number] for number in row) for row in rows]
        length = self._max_tokens if self._fixed and self._max_tokens else max(sizes)
        batch: dict[str, Tensor] = {}
        for name in documents[0]:
            whole = [torch.cat([documents[number][name] for number in row]) for row in rows]
            padded = [functional.pad(one, (0, length - len(one)), value=self._padding[name]) for one in whole]
            batch[name] = torch.stack(padded)
        counts = [[*(lengths[number] for number in row), length - size] for row, size in zip(rows, sizes, strict=True)]
        batch["position_ids"] = torch.stack([torch.cat([*map(torch.arange, several)]) for several in counts])
        return batch


def rows_of(lengths: Sequence[int], max_tokens: int | None = None) -> list[list[int]]:
    """Documents of each row: first-fit decreasing, ties in their order; one row without `max_tokens`."""
    if max_tokens is None:
        return [list(range(len(lengths)))]
    if max(lengths) > max_tokens:
        raise DataError(
            f"a document has {max(lengths)} tokens, more than the {max_tokens} of a row; raise `max_tokens`.",
            field="max_tokens",
        )
    return pack(lengths, max_tokens=max_tokens)


def _document(sample: Any, number: int) -> dict[str, Tensor]:
    given = cast("Mapping[str, Any]", sample) if isinstance(sample, Mapping) else {"input_ids": sample}
    tokens = torch.as_tensor(given["input_ids"]).long()
    labels = torch.as_tensor(given.get("labels", tokens)).long().clone()
    document = {"input_ids": tokens, "labels": labels}
    if "weights" in given:
        document["weights"] = torch.as_tensor(given["weights"], dtype=torch.get_default_dtype())
    for name, one in document.items():
        if one.ndim != 1 or one.shape != tokens.shape or not len(one):
            raise DataError(
                f"`{name}` of sample {number} of the batch must be as many numbers as its `input_ids`.", field=name
            )
    if not bool((torch.as_tensor(given.get("attention_mask", 1)) != 0).all()):
        raise DataError(
            f"sample {number} of the batch has padding (`attention_mask`); give its tokens without it.",
            field="attention_mask",
        )
    labels[0] = _IGNORED
    return document
