"""32-true: every tensor computes in the format it has.

For float32 and float64 models alike. It is not a conversion: nothing is cast.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from evenstep.precision.precision import Precision


@final
class FullPrecision(Precision):
    """No mixed precision.

    Args:
        bfloat16_parameters: whether parameters in bfloat16 are trained as they are. The optimizer then adds its updates
            to numbers of 8 bits, so those below 1/256 of a parameter are lost, unless it keeps copies of its own.

    >>> FullPrecision().name, FullPrecision().scale
    ('32-true', 1.0)
    """

    name = "32-true"

    def __init__(self, *, bfloat16_parameters: bool = False) -> None:
        self._bfloat16_parameters = bfloat16_parameters

    @property
    def settings(self) -> dict[str, Any]:
        return {"bfloat16_parameters": self._bfloat16_parameters}

    def check_trained(self, trained: Mapping[str, Tensor]) -> None:
        meant = torch.bfloat16 if self._bfloat16_parameters else None
        super().check_trained({name: one for name, one in trained.items() if one.dtype != meant})
