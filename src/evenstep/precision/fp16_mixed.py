"""16-mixed: float32 parameters, matrix products in float16 under autocast, with a dynamic loss scale.

Parameters, gradients and optimizer state stay float32. It is not 16-true, in which the model itself is float16.
"""

from contextlib import AbstractContextManager
from typing import Any, final

import torch

from evenstep.precision.loss_scale import LossScaled


@final
class Fp16Mixed(LossScaled):
    """float16 autocast with a dynamic loss scale; the arguments are those of `LossScaled`.

    >>> precision = Fp16Mixed(initial=4.0, growth_updates=2)
    >>> precision.overflowed(); precision.scale
    2.0
    >>> precision.committed(); precision.committed(); precision.scale
    4.0
    """

    name = "16-mixed"
    instead = "bf16-mixed"

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.float16)
