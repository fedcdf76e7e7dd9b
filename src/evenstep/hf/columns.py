"""Arguments of a model's `forward`, and the label of tokens that are not counted."""

import inspect
from typing import Any

from torch import nn

from evenstep.internals import unwrapped

IGNORED = -100  # the label of tokens that are not counted


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Argument by which a decoder keeps no keys and values for generation; none where its `forward` lists none.

    >>> without_cache(nn.Linear(1, 1))
    {}
    """
    whole: Any = unwrapped(model)
    kinds = [type(whole)]
    if hasattr(whole, "get_base_model"):  # a model of peft, which hands on what it does not know
        kinds.append(type(whole.get_base_model()))
    takes = any("use_cache" in inspect.signature(kind.forward).parameters for kind in kinds)
    return {"use_cache": False} if takes else {}
