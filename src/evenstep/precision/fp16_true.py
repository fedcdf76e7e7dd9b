"""16-true: a float16 model, with float32 master weights and a dynamic loss scale.

What comes back through the model is float16 and scaled; gradients are summed in float32, where the scale is one factor
of the update's deferred multiplier, so it is taken out once. Numbers above 65504 are inf in float16, in forwards too.
"""

from typing import final

from evenstep.precision.sixteen_bits import ScaledSixteenBits


@final
class Fp16True(ScaledSixteenBits):
    """A float16 model with float32 master weights; the arguments are those of `ScaledSixteenBits`.

    >>> Fp16True(initial=8.0).scale
    8.0
    """

    name = "16-true"
    instead = "bf16-true"
    keeps_masters = True
