"""bf16-true-no-master: a bfloat16 model without master weights; updates are rounded into it at random.

The step is made in float32, a few parameters at a time, and each new value x is rounded up or down with the
probabilities that make its mean x: updates far below 1/256 of a parameter are kept in the mean, where rounding to the
nearest would lose them all. Which way is keyed by (seed, update, parameter, element), so it does not depend on the
layout. It costs 14 bytes per parameter with Adam. Reference: Gupta et al., "Deep learning with limited numerical
precision", ICML 2015.
"""

from typing import final

import torch

from evenstep.precision.sixteen_bits import SixteenBits


@final
class Bf16NoMaster(SixteenBits):
    """A bfloat16 model, rounded stochastically; the arguments are those of `SixteenBits`.

    >>> Bf16NoMaster().name
    'bf16-true-no-master'
    """

    name = "bf16-true-no-master"
    format = torch.bfloat16
    keeps_masters = False
