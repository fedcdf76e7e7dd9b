"""32-true: every tensor computes in the format it has.

For float32 and float64 models alike. It is not a conversion: nothing is cast.
"""

from typing import final

from evenstep.precision.precision import Precision


@final
class Full(Precision):
    """No mixed precision.

    >>> Full().name, Full().scale
    ('32-true', 1.0)
    """

    name = "32-true"
