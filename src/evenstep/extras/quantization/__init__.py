"""Training models that will be quantised: fake-quantised layers, codebooks in the place of weights, and noise.

All are hooks that act at set updates. A model is prepared before its optimizer is built, so that nothing is replaced
in a run: optimizer, ranks, averages and checkpoints know the same parameters from the first update to the last.
"""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.extras.quantization.aware import QuantizationAware
    from evenstep.extras.quantization.noise import QuantizationNoise
    from evenstep.extras.quantization.product import LayerGroup, ProductQuantization, compressed_state

__all__ = ["LayerGroup", "ProductQuantization", "QuantizationAware", "QuantizationNoise", "compressed_state"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".aware": "QuantizationAware",
        ".noise": "QuantizationNoise",
        ".product": "LayerGroup ProductQuantization compressed_state",
    },
)
