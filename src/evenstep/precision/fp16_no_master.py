"""16-true-no-master: a float16 model without master weights, with a dynamic loss scale.

The step is made in float32, a few parameters at a time, with the loss scale folded into the deferred multiplier, and
rounded back at random as in bf16-true-no-master. It costs 14 bytes per parameter with Adam. Parameters must stay below
65504.
"""

from typing import final

from evenstep.precision.sixteen_bits import ScaledSixteenBits


@final
class Fp16NoMaster(ScaledSixteenBits):
    """A float16 model, rounded stochastically; the arguments are those of `ScaledSixteenBits`.

    >>> Fp16NoMaster(initial=8.0).scale
    8.0
    """

    name = "16-true-no-master"
    instead = "bf16-true-no-master"
    keeps_masters = False
