"""A contiguous slice of the model, owned by one pipeline rank.

A stage holds any callable: a module, a compiled one, a wrapped one. It is not a module itself, so wrapping a model
into a stage changes no parameter name.
"""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """One slice of the model.

    Args:
        index: number of the stage in the whole model, counted from 0.
        module: what computes the stage's output from its inputs.
    """

    index: int
    module: Callable[..., Any]

    def __call__(self, inputs: object) -> Any:
        """Apply the stage: a plain tuple is its positional arguments, a dict (also a `UserDict`, such as the
        `BatchEncoding` of `transformers`) its keyword arguments, all else its only argument.

        >>> Stage(0, max)((3, 4)), Stage(0, dict)({"a": 1}), Stage(0, abs)(-1)
        (4, {'a': 1}, 1)
        """
        if type(inputs) is tuple:
            return self.module(*cast("tuple[Any, ...]", inputs))
        if isinstance(inputs, dict | UserDict):
            return self.module(**cast("dict[str, Any]", inputs))
        return self.module(inputs)
