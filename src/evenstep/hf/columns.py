"""Columns with a value for each token that nobody would look at: refused by name, where they would be dropped unsaid.

Models of transformers take any name and ignore what they do not know: a misspelt mask, or the mask of another library
that says what is to be learned, would change nothing. What a model is called with is read from its `forward`.
"""

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, cast, final

from torch import Tensor, nn

from evenstep.errors import TaskError
from evenstep.internals import unwrapped

_OF_TOKENIZERS = ("token_type_ids", "special_tokens_mask", "offset_mapping")  # they come unasked, and may be ignored
_OF_TASKS = ("labels", "weights")
IGNORED = -100  # the label of what is not counted
LEARNED = "what is not to be learned has the label -100, in `labels`"


@final
class Columns:
    """What of a batch the model of a task looks at; as long as it knows no model, everything."""

    def __init__(self) -> None:
        self._model, self._taken = "", None
        self._is_said = False

    def look_at(self, model: nn.Module) -> None:
        """Find out what `model` is called with."""
        self._model, self._taken = type(unwrapped(model)).__name__, names_taken(model)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise TaskError for a tensor of the batch with a value for each token that the model would ignore.

        A fraction for each row may be meant to weigh it, and is said once; numbers and texts are the user's own.
        """
        if self._taken is None:
            return
        given = [one.shape for name in ("input_ids", "labels") if isinstance(one := batch.get(name), Tensor)]
        tokens, rows = [shape[:2] for shape in given if len(shape) > 1], [shape[:1] for shape in given]
        for name, one in batch.items():
            if name in self._taken or name in _OF_TASKS or name in _OF_TOKENIZERS:
                continue
            if not isinstance(one, Tensor):
                continue
            if one.ndim == 1 and one.is_floating_point() and one.shape in rows and not self._is_said:
                self._is_said = True
                logging.getLogger("evenstep").warning(
                    f"`{name}` of the batch has a fraction for each row, but {self._model} is called with nothing of "
                    f"that name, so it changes nothing; weights of labels are called `weights`, and are of their shape."
                )
            if one.shape[:2] in tokens:
                raise TaskError(
                    f"`{name}` of the batch has a value for each token, but {self._model} is called with nothing of "
                    f"that name, and would ignore it; leave it out, or correct the name ({LEARNED})."
                )


def names_taken(model: nn.Module) -> Set[str] | None:
    """The names that a model's `forward` lists; None where it takes others as well, which it need not ignore.

    >>> class Scores(nn.Module):
    ...     def forward(self, input_ids, attention_mask=None): ...
    >>> class Any(nn.Module):
    ...     def forward(self, **named): ...
    >>> sorted(names_taken(Scores())), names_taken(Any())
    (['attention_mask', 'input_ids', 'self'], None)
    """
    own, base = _signatures(model)
    names = {*own}
    for one in base.values():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            listed: Any = next(iter(getattr(one.annotation, "__args__", ())), None)
            if not hasattr(listed, "__optional_keys__"):
                return None
            names |= listed.__required_keys__ | listed.__optional_keys__
        names.add(one.name)
    return names


def without_cache(model: nn.Module) -> dict[str, bool]:
    """What a decoder is given so that it keeps no keys and values for generation; nothing where `forward` lists none.

    >>> without_cache(nn.Linear(1, 1))
    {}
    """
    return {"use_cache": False} if any("use_cache" in one for one in _signatures(model)) else {}


def _signatures(model: nn.Module) -> tuple[Mapping[str, inspect.Parameter], Mapping[str, inspect.Parameter]]:
    """The parameters of a model's `forward`, and of that of the model within, to which it hands on what it is given."""
    whole: Any = unwrapped(model)
    own = base = inspect.signature(type(whole).forward).parameters
    if hasattr(whole, "get_base_model"):  # a model of peft, which hands on what it does not know
        base = inspect.signature(type(whole.get_base_model()).forward).parameters
    return own, base


def unused_column(sample: Mapping[str, Any], tokens: int, known: Collection[str]) -> str:
    """The name of a column of a sample that has a value for each of its tokens, and is none of `known`; else "".

    >>> unused_column({"input_ids": [5, 6], "mask": [0, 1], "text": "ab"}, 2, ["input_ids"])
    'mask'
    """
    for name, one in sample.items():
        if name in known or name in _OF_TOKENIZERS or isinstance(one, str | bytes):
            continue
        is_list = isinstance(one, Sequence) or (hasattr(one, "__array__") and getattr(one, "ndim", 0))
        if is_list and len(cast("Sequence[Any]", one)) == tokens:
            return name
    return ""
