"""bf16-mixed: float32 parameters, matrix products in bfloat16 under autocast.

bfloat16 has the exponent range of float32, so no loss scale is needed. Reference: Kalamkar et al., "A study of
BFLOAT16 for deep learning training", 2019. It is not bf16-true: parameters and optimizer state stay float32.
"""

from contextlib import AbstractContextManager
from typing import Any, final

import torch

from evenstep.precision.precision import Precision


@final
class Bf16Mixed(Precision):
    """bfloat16 autocast.

    >>> Bf16Mixed().name
    'bf16-mixed'
    """

    name = "bf16-mixed"

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)
