"""bf16-true: a bfloat16 model, with float32 master weights that the optimizer steps.

bfloat16 has the exponent range of float32, so no loss scale is needed, and 8 bits of mantissa: a master weight takes up
what an update adds below 1/256 of it, and the model gets its rounded value. It costs 18 bytes per parameter with Adam
(2 model, 4 master, 4 gradient, 8 state) and half the activations of float32.
"""

from typing import final

import torch

from evenstep.precision.sixteen_bits import SixteenBits


@final
class Bf16True(SixteenBits):
    """A bfloat16 model with float32 master weights; the arguments are those of `SixteenBits`.

    >>> Bf16True().name, Bf16True().scale
    ('bf16-true', 1.0)
    """

    name = "bf16-true"
    format = torch.bfloat16
    keeps_masters = True
