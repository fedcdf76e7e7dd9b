"""Rows of whole documents: a micro-batch's samples one after the other instead of each beside its padding.

Packing is done where a micro-batch is collated, so samples stay samples: order, global batches, what is skipped and
where a run goes on are those of the same data unpacked, and so is each update, up to the rounding of sums. Which
document is in which row is a function of their lengths and order alone. It cuts none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.arguments import require_count
from evenstep.data.batching import pack
from evenstep.errors import ArgumentError, DataError
from evenstep.hf.columns import IGNORED

_PADDING = {"input_ids": 0, "labels": IGNORED, "weights": 0.0}


@final
class Packing:
    """A collate function: rows of documents, with `position_ids` that begin anew at each.

    Documents are put, longest first, into the first row that has room for them ("first-fit decreasing", Johnson 1973).

    Samples are lists of tokens, or mappings with `input_ids` and perhaps `labels` (the tokens themselves by default;
    −100 is not counted) and `weights`, one for each token; an `attention_mask` that leaves nothing out is taken as
    said. The first label of a document is not counted: nothing stands before it. The batch has no `attention_mask`,
    since transformers looks for documents only where there is none; use it with `CausalLM(packed=True)`.

    Args:
        max_tokens: the most tokens of a row; None for one row of all samples, without any padding.
        fixed: whether rows are padded to `max_tokens`, so that all have one shape; else to the longest of the batch.
        pad_token_id: what rows are padded with; a document of its own, not counted.

    Raises:
        ArgumentError: an argument that cannot be.

    >>> batch = Packing(max_tokens=4)([[5, 6], [7, 8, 9], [4]])
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
    ([[7, 8, 9, 4], [5, 6, 0, 0]], [[0, 1, 2, 0], [0, 1, 0, 1]])
    >>> batch["labels"].tolist()
    [[-100, 8, 9, -100], [-100, 6, -100, -100]]
    """

    def __init__(self, *, max_tokens: int | None = None, fixed: bool = False, pad_token_id: int = 0) -> None:
        self._max_tokens = None if max_tokens is None else require_count("max_tokens", max_tokens)
        if fixed and max_tokens is None:
            raise ArgumentError("`fixed` pads rows to `max_tokens`, which is not given; give it.")
        self._fixed = fixed
        self._pad = require_count("pad_token_id", pad_token_id, at_least=0)

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """The batch of these samples: `input_ids`, `position_ids`, `labels` and, if given, `weights`, `[rows, length]`.

        Raises:
            DataError: a sample that is no document, or is longer than a row.
        """
        documents = [_document(sample, number) for number, sample in enumerate(samples)]
        if len({"weights" in document for document in documents}) > 1:
            raise DataError("some samples have `weights`, others have not; give them to all, or to none.")
        lengths = [len(document["input_ids"]) for document in documents]
        rows = rows_of(lengths, self._max_tokens)
        longest = max(sum(lengths[number] for number in row) for row in rows)
        length = self._max_tokens if self._fixed and self._max_tokens else longest
        padding = {**_PADDING, "input_ids": self._pad}
        batch = {
            name: _joined([[documents[number][name] for number in row] for row in rows], length, padding[name])
            for name in documents[0]
        }
        places = [[torch.arange(lengths[number]) for number in row] for row in rows]
        filled = [[*some, torch.arange(length - sum(map(len, some)))] for some in places]
        return {**batch, "position_ids": _joined(filled, length, 0)}


def rows_of(lengths: Sequence[int], max_tokens: int | None = None) -> list[list[int]]:
    """Which documents are in which row: first-fit decreasing, ties in their order; one row without `max_tokens`.

    Raises:
        DataError: a document is longer than a row.

    >>> rows_of([2, 3, 1], 4)
    [[1, 2], [0]]
    """
    if max_tokens is None:
        return [list(range(len(lengths)))]
    longest = max(lengths)
    if longest > max_tokens:
        raise DataError(f"a document has {longest} tokens, more than the {max_tokens} of a row; raise `max_tokens`.")
    return pack(lengths, max_tokens=max_tokens)


def _document(sample: Any, number: int) -> dict[str, Tensor]:
    given = cast("Mapping[str, Any]", sample) if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in given:
        raise DataError(f"sample {number} of the batch has no `input_ids`; give its tokens.")
    tokens = _whole(given["input_ids"], "input_ids", number)
    labels = _whole(given.get("labels", tokens), "labels", number).clone()
    document = {"input_ids": tokens, "labels": labels}
    if "weights" in given:
        document["weights"] = torch.as_tensor(given["weights"], dtype=torch.get_default_dtype())
    mask = torch.as_tensor(given.get("attention_mask", torch.ones_like(tokens)))
    for name, one in (*document.items(), ("attention_mask", mask)):
        if one.ndim != 1 or one.shape != tokens.shape or not len(one):
            raise DataError(f"`{name}` of sample {number} of the batch must be as many numbers as its `input_ids`.")
    if not bool((mask != 0).all()):
        raise DataError(f"sample {number} of the batch has padding (`attention_mask`); give its tokens without it.")
    labels[0] = IGNORED
    return document


def _whole(given: Any, name: str, number: int) -> Tensor:
    found = torch.as_tensor(given)
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise DataError(f"`{name}` of sample {number} of the batch must be whole numbers, but are {found.dtype}.")
    return found.long()


def _joined(rows: Sequence[Sequence[Tensor]], length: int, padding: float) -> Tensor:
    joined = rows[0][0].new_full((len(rows), length), padding)
    for row, parts in zip(joined, rows, strict=True):
        whole = torch.cat(list(parts))
        row[: len(whole)] = whole
    return joined
